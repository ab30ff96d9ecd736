// Hand-offs: when they were (a lane a pair of nodes), and how long each took and what it moved.

const LANE_SPAN_S = 120;
const MAX_LANES = 4;
const LANE = { top: 4, height: 18, bottom: 18 };
const NUM_ROWS = 10;

function makeHandoffsPanel() {
  const place = byId("handoffs");
  const empty = el("p", { class: "empty", hidden: true });
  const full = el("div");
  place.append(empty, full);
  const lanes = chart(full, LANE.top + LANE.height + LANE.bottom,
    "Hand-offs of the last two minutes");
  full.append(el("p", { class: "legend" },
    swatch("wait", "waiting for room"), swatch("move", "transfer"),
    swatch("rest", "reserving, verifying, acknowledging")));
  const head = el("tr", {}, ...[["Request"], ["From → to", "wide"], ["Path"], ["Backend", "wide"],
    ["Moved", "num"], ["Blocks", "num wide"], ["Runs", "num wide"], ["Calls", "num"],
    ["Time", "num"], ["", "bar wide"], ["", "num wide"]].map(([text, type]) =>
    el("th", { scope: "col", class: type, text: text })));
  const scale = head.children[9];
  const rows = Array.from({ length: NUM_ROWS }, makeHandoffRow);
  full.append(el("div", { class: "scroll", tabindex: "0", role: "region",
    "aria-label": "Latest hand-offs" }, el("table", { class: "gantt" },
    el("thead", {}, head), el("tbody", {}, ...rows.map((row) => row.root)))));
  let store = null;
  lanes.redraw = draw;

  function draw() {
    if (!store || !store.cluster) return;
    const handoffs = store.handoffs;
    full.hidden = store.isAlone && handoffs.length === 0;
    empty.hidden = !full.hidden;
    if (full.hidden) {
      setText(empty, "No hand-offs: one node computes prompts and decodes them.");
      return;
    }
    drawLanes(lanes, store, handoffs, numLanes(store));
    const shown = handoffs.slice(0, NUM_ROWS);
    const longest = Math.max(0, ...shown.map((record) => record.handoff.total_s));
    setText(scale, shown.length ? "0 to " + seconds(longest) : "");
    rows.forEach((row, i) => row.show(shown[i], longest, store));
  }

  return { update: function (news) { store = news; draw(); } };
}

function swatch(type, text) {
  return el("span", {}, el("span", { class: "key-swatch " + type, "aria-hidden": "true" }), text);
}

function makeHandoffRow() {
  const cells = ["id", "wide", "", "wide", "num", "num wide", "num wide", "num", "num"]
    .map((type) => el("td", { class: type }));
  const parts = ["wait", "move", "rest"].map((type) => svg("rect", { class: type, height: 10, y: 2 }));
  const bar = svg("svg", { width: "100%", height: 14, role: "img", preserveAspectRatio: "none",
    viewBox: "0 0 100 14" }, ...parts);
  const when = el("td", { class: "num wide muted" });
  const root = el("tr", {}, ...cells, el("td", { class: "bar wide" }, bar), when);

  function show(record, longest, store) {
    const handoff = record ? record.handoff : null;
    const sent = handoff ? handoff.num_blocks - handoff.num_reused_blocks : 0;
    const texts = handoff ? [shortId(record.request_id), handoff.src + " → " + handoff.dst,
      handoff.path, handoff.backend, bytes(handoff.data_bytes),
      number(sent) + (handoff.num_reused_blocks ? " + " + handoff.num_reused_blocks + " there" : ""),
      number(handoff.runs), number(handoff.calls), seconds(handoff.total_s)] : [];
    cells.forEach((cell, i) => setText(cell, texts[i] || ""));
    setAttribute(cells[0], "title", record ? record.request_id : "");
    setText(when, record ? ago(store.nowS - record.handed_off_s) : "");
    const spans = handoff ? partsOf(handoff) : [0, 0, 0];
    let x = 0;
    spans.forEach((span, i) => {
      const width = longest > 0 ? Math.max(i === 1 && span > 0 ? 0.7 : 0, span / longest * 100) : 0;
      setAttribute(parts[i], "x", round(x));
      setAttribute(parts[i], "width", round(width));
      x += width;
    });
    setAttribute(bar, "aria-label", handoff ? "waiting " + seconds(spans[0]) + ", transfer "
      + seconds(spans[1]) + ", the rest " + seconds(spans[2]) : "");
  }

  return { root: root, show: show };
}

// Waiting for room, transfer, the rest. Room is asked for while the prompt is computed still: of that
// wait only what lies within the hand-off's time counts.
function partsOf(handoff) {
  const around = Math.max(0, handoff.total_s - handoff.transfer_s);
  const wait = Math.min(handoff.deferred_s, around);
  return [wait, Math.min(handoff.transfer_s, handoff.total_s), around - wait];
}

// As many as pairs of nodes there may be, so that the height depends on the nodes alone.
function numLanes(store) {
  const count = (other) => store.cluster.nodes.filter((node) => node.home_role !== other).length;
  return Math.max(1, Math.min(MAX_LANES, count("decode") * count("prefill")));
}

function drawLanes(lanes, store, handoffs, most) {
  const width = lanes.width;
  if (!width) return;
  const recent = handoffs.filter((record) => record.handed_off_s > store.nowS - LANE_SPAN_S);
  const counts = new Map();
  for (const { handoff } of recent) {
    const pair = handoff.src + " → " + handoff.dst;
    counts.set(pair, (counts.get(pair) || 0) + 1);
  }
  const pairs = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a))
    .slice(0, most).sort();
  const left = Math.min(170, width * 0.5);
  const x = (timeS) => left + (1 - (store.nowS - timeS) / LANE_SPAN_S) * (width - left - 8);
  const bottom = LANE.top + most * LANE.height;
  lanes.setHeight(bottom + LANE.bottom);
  const parts = [];
  for (let at = 0; at <= LANE_SPAN_S; at += width - left < 240 ? 60 : 30) {
    const line = round(x(store.nowS - at));
    parts.push(svg("path", { class: "grid", d: "M" + line + " " + LANE.top + "V" + bottom }));
    parts.push(svg("text", { x: line, y: bottom + 14, text: at === 0 ? "now" : "−" + at + " s",
      "text-anchor": at === 0 ? "end" : "middle" }));
  }
  pairs.forEach((pair, i) => {
    const y = LANE.top + i * LANE.height;
    parts.push(svg("text", { class: "strong", x: 0, y: y + 12, text: pair }));
    parts.push(svg("text", { x: left - 8, y: y + 12, "text-anchor": "end",
      text: number(counts.get(pair)) }));
    let d = "";
    for (const record of recent) {
      if (record.handoff.src + " → " + record.handoff.dst !== pair) continue;
      const end = x(record.handed_off_s);
      const begin = Math.max(left, x(record.handed_off_s - record.handoff.total_s));
      d += "M" + round(begin) + " " + (y + 3) + "h" + round(Math.max(1.5, end - begin)) + "v11H"
        + round(begin) + "z";
    }
    parts.push(svg("path", { class: "lane-bar", d: d }));
  });
  if (!pairs.length) {
    parts.push(svg("text", { class: "strong", x: 0, y: LANE.top + 12, text: handoffs.length
      ? "none in the last two minutes" : "no hand-off yet" }));
  }
  lanes.root.replaceChildren(...parts);
  setAttribute(lanes.root, "aria-label", plural(recent.length, "hand-off")
    + " in the last two minutes: " + pairs.map((pair) => pair + " " + counts.get(pair)).join(", "));
}
