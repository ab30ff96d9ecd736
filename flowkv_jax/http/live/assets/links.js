// Source x destination: how much each pair moves, and over which path.

const LINK_SPAN_S = 60;
const RATE_STEPS = [1e6, 1e7, 1e8, 1e9];
const USE_STEPS = [0.05, 0.25, 0.5, 0.75];
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
    const isMeasured = store.cluster.nodes.some((node) => (node.links || []).length);
    setText(byId("links-unit"), isMeasured ? "utilisation of the configured links"
      : "bytes/s of hand-offs, last " + LINK_SPAN_S + " s");
    setText(byId("links-note"), isMeasured
      ? "The busiest link between two nodes, with the load at which paths avoid it."
      : "No links are configured (handoff_links), so their utilisation is not known: this is what"
        + " arrived.");
    const pairs = pairsOf(store);
    place.replaceChildren(heatTable(store, pairs, isMeasured), heatLegend(isMeasured));
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

function heatTable(store, pairs, isMeasured) {
  const nodes = store.cluster.nodes;
  const sends = (node) => node.role !== "decode" || [...pairs.keys()]
    .some((key) => key.startsWith(node.name + "\n"));
  const receives = (node) => node.role !== "prefill" || [...pairs.keys()]
    .some((key) => key.endsWith("\n" + node.name));
  const columns = nodes.filter(receives);
  const head = el("tr", {}, el("th", { scope: "col", text: "from \\ to" }),
    ...columns.map((node) => el("th", { scope: "col", text: node.name, title: node.name })));
  const rows = nodes.filter(sends).map((src) => el("tr", {},
    el("th", { scope: "row", text: src.name, title: src.name }),
    ...columns.map((dst) => src.name === dst.name ? el("td", { class: "muted", text: "itself" })
      : heatCell(src, dst, pairs.get(src.name + "\n" + dst.name), isMeasured))));
  return el("table", { class: "heat" }, el("thead", {}, head), el("tbody", {}, ...rows));
}

function heatCell(src, dst, pair, isMeasured) {
  const link = (src.links || []).find((one) => one.dst === dst.name);
  const value = isMeasured ? (link ? link.utilisation : null)
    : (pair ? pair.bytes / LINK_SPAN_S : 0);
  const steps = isMeasured ? USE_STEPS : RATE_STEPS;
  const heat = value ? steps.filter((step) => value >= step).length : 0;
  const text = value === null ? "not a link" : isMeasured ? percent(value)
    : value ? bytes(value) + "/s" : "nothing";
  const notes = [];
  if (pair) {
    const kind = [...pair.kinds].sort((a, b) => b[1] - a[1])[0][0];
    notes.push(kind + " · " + plural(pair.count, "hand-off"));
  }
  if (isMeasured && link) notes.push("avoided from " + percent(link.threshold));
  return el("td", { "data-heat": heat,
    class: isMeasured && link && value >= link.threshold ? "over" : null },
  el("span", { "aria-hidden": "true", class: "muted", text: HEAT_SIGNS[heat] + " " }), text,
  el("small", { text: notes.join(", ") || " " }));
}

function heatLegend(isMeasured) {
  const steps = isMeasured ? USE_STEPS.map(percent) : RATE_STEPS.map((step) => bytes(step) + "/s");
  return el("p", { class: "heat-legend" }, ...HEAT_SIGNS.map((sign, i) =>
    el("span", {}, el("b", { text: sign + " " }), i ? "from " + steps[i - 1] : "below " + steps[0])));
}
