// Source x destination: how much each pair moves, and over which path.

const LINK_SPAN_S = 60;
const RATE_STEPS = [1e6, 1e7, 1e8, 1e9];
const USE_STEPS = [0.05, 0.25, 0.5, 0.75];
const KINDS = {
  measured: {
    unit: "measured utilisation of the configured links, %", steps: USE_STEPS, text: percent,
    note: "The busiest link on the direct way. From its threshold on, paths avoid it.",
    of: (link) => link && link.utilisation,
  },
  nominal: {
    unit: "hand-offs as a share of the configured bandwidth, %, last " + LINK_SPAN_S + " s",
    steps: USE_STEPS, text: percent,
    note: "Nothing on this machine measures these links: the share is what hand-offs moved.",
    of: (link, rate) => link ? rate / link.bytes_per_s : null,
  },
  rate: {
    unit: "bytes/s of hand-offs, last " + LINK_SPAN_S + " s", steps: RATE_STEPS,
    text: (value) => bytes(value) + "/s",
    note: "No links are configured (handoff_links), so there is no utilisation: this is what"
      + " arrived.",
    of: (link, rate) => rate,
  },
};
const HEAT_SIGNS = ["·", "▂", "▄", "▆", "█"];

function makeLinksPanel() {
  const place = byId("links");
  let drawn = "";

  function update(store) {
    if (!store.cluster) return;
    if (store.isAlone) {
      setText(byId("links-unit"), "");
      setText(byId("links-note"), "");
      if (drawn !== "alone") {
        place.replaceChildren(el("p", { class: "empty", text: "No hand-offs: one node." }));
      }
      drawn = "alone";
      return;
    }
    const links = store.cluster.nodes.flatMap((node) => node.link_loads);
    const kind = links.some((link) => link.utilisation !== null) ? KINDS.measured
      : links.length ? KINDS.nominal : KINDS.rate;
    setText(byId("links-unit"), kind.unit);
    const media = new Set(links.map((link) => link.medium + " " + bytes(link.bytes_per_s)
      + "/s, threshold " + percent(link.threshold)));
    setText(byId("links-note"), kind.note + (media.size ? " (" + [...media].join("; ") + ")" : ""));
    place.replaceChildren(heatTable(store, pairsOf(store), kind), heatLegend(kind));
    drawn = "table";
  }

  return { update: update };
}

function pairsOf(store) {
  const pairs = new Map();
  for (const record of store.handoffs) {
    if (record.handed_off_s < store.nowS - LINK_SPAN_S) break;
    const { src, dst, data_bytes: size, path: kind } = record.handoff;
    const key = src + "\n" + dst;
    const pair = pairs.get(key) || { bytes: 0, count: 0, kinds: new Map() };
    pair.bytes += size;
    pair.count += 1;
    pair.kinds.set(kind, (pair.kinds.get(kind) || 0) + 1);
    pairs.set(key, pair);
  }
  return pairs;
}

function heatTable(store, pairs, kind) {
  const ends = (i) => new Set([...pairs.keys()].map((key) => key.split("\n")[i]));
  const sources = ends(0);
  const targets = ends(1);
  const nodes = [...store.cluster.nodes];
  for (const name of [...sources, ...targets]) {  // those of other servers, and those that left
    if (!nodes.some((node) => node.name === name)) {
      nodes.push({ name: name, role: sources.has(name) ? "prefill" : "decode", link_loads: [] });
    }
  }
  const columns = nodes.filter((node) => node.role !== "prefill" || targets.has(node.name));
  const head = el("tr", {}, el("th", { scope: "col", text: "from ↓ to →" }),
    ...columns.map((node) => el("th", { scope: "col", text: node.name, title: node.name })));
  const rows = nodes.filter((node) => node.role !== "decode" || sources.has(node.name))
    .map((src) => el("tr", {},
      el("th", { scope: "row", text: src.name, title: src.name }),
      ...columns.map((dst) => src.name === dst.name ? el("td", { class: "muted", text: "itself" })
        : heatCell(src, dst, pairs.get(src.name + "\n" + dst.name), kind))));
  const table = el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, ...rows));
  table.style.minWidth = (columns.length + 1) * 84 + "px";
  return el("div", { class: "scroll" }, table);
}

function heatCell(src, dst, pair, kind) {
  const link = src.link_loads.find((one) => one.dst === dst.name);
  const rate = pair ? pair.bytes / LINK_SPAN_S : 0;
  const value = kind.of(link, rate);
  const isKnown = value !== null && value !== undefined;
  const heat = isKnown ? kind.steps.filter((step) => value >= step).length : 0;
  const notes = [];
  if (pair) {
    const path = [...pair.kinds].sort((a, b) => b[1] - a[1])[0][0];
    notes.push(path, plural(pair.count, "hand-off"));
    if (kind !== KINDS.rate) notes.push(bytes(rate) + "/s");
  }
  const isOver = isKnown && link && kind !== KINDS.rate && value >= link.threshold;
  const about = link ? link.medium + " " + bytes(link.bytes_per_s) + "/s, threshold "
    + percent(link.threshold) : null;
  return el("td", { "data-heat": heat, class: isOver ? "over" : null, title: about },
    el("span", { "aria-hidden": "true", class: "muted", text: HEAT_SIGNS[heat] + " " }),
    (isKnown ? kind.text(value) : "no direct link") + (isOver ? " ⚠ over" : ""),
    el("small", { text: notes.join(" · ") || "nothing moved" }));
}

function heatLegend(kind) {
  return el("p", { class: "heat-legend" }, ...HEAT_SIGNS.map((sign, i) =>
    el("span", {}, el("b", { text: sign + " " }), i ? "from " + kind.text(kind.steps[i - 1])
      : "below " + kind.text(kind.steps[0]))));
}
