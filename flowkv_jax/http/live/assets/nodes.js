// A card a node: role, state, queues, and its pool with the free segments.

const COUNTS = [
  ["running", "num_requests_running"],
  ["waiting", "num_requests_waiting"],
  ["swapped", "num_requests_swapped"],
  ["sending", "num_requests_sending"],
  ["receiving", "num_requests_receiving"],
];
const POOL_HEIGHT = 26;
const ORDER = ["prefill", "hybrid", "decode"];

function makeNodesPanel() {
  const list = byId("node-list");
  const cards = new Map();

  function update(store) {
    const nodes = [...(store.cluster ? store.cluster.nodes : [])].sort((a, b) =>
      ORDER.indexOf(a.home_role) - ORDER.indexOf(b.home_role) || a.name.localeCompare(b.name));
    nodes.forEach((node, i) => {
      if (!cards.has(node.name)) cards.set(node.name, makeNodeCard(node.name));
      const card = cards.get(node.name);
      if (list.children[i] !== card.root) list.insertBefore(card.root, list.children[i] || null);
      card.update(node, store);
    });
    for (const [name, card] of cards) {
      if (nodes.some((node) => node.name === name)) continue;
      card.root.remove();
      cards.delete(name);
    }
  }

  return { update: update };
}

function makeNodeCard(name) {
  const role = el("span", { class: "badge" });
  const state = el("span", { class: "muted" });
  const score = el("span", { class: "push muted" });
  const counts = COUNTS.map(([label]) => {
    const value = el("dd", { text: NONE });
    return { root: el("div", {}, el("dt", { text: label }), value), value: value };
  });
  const gauge = [svg("rect", { class: "held", height: 5 }), svg("rect", { class: "cached", height: 5 })];
  const gaugeBox = svg("svg", { class: "gauge", viewBox: "0 0 100 5", preserveAspectRatio: "none",
    "aria-hidden": "true" }, ...gauge);
  const cells = svg("path");
  const pool = svg("svg", { class: "pool", role: "img", preserveAspectRatio: "none" }, cells);
  const use = el("span");
  const free = el("span");
  const root = el("li", { class: "node" },
    el("div", { class: "node-head" }, el("strong", { text: name }), role, state, score),
    el("dl", { class: "counts", "aria-label": "Sequences" }, ...counts.map((one) => one.root)),
    el("div", { class: "pool-legend" }, use, free), gaugeBox, pool);

  function update(node, store) {
    setAttribute(root, "data-role", node.role);
    setText(role, node.role + (node.role === node.home_role ? "" : " (lent)"));
    setText(state, stateOf(node, store));
    setText(score, scoresOf(node));
    COUNTS.forEach(([, field], i) => {
      const count = node.load ? node.load[field] : null;
      setText(counts[i].value, number(count));
      counts[i].root.toggleAttribute("data-zero", count === 0);
    });
    const used = drawPool(pool, cells, node);
    const load = node.load;
    const held = load ? load.kv_cache_usage : 0;
    const cached = Math.max(0, used - held);
    setAttribute(gauge[0], "width", round(held * 100));
    setAttribute(gauge[1], "x", round(held * 100));
    setAttribute(gauge[1], "width", round(cached * 100));
    setText(use, load ? percent(held) + " held by requests · " + percent(cached) + " cached · "
      + percent(Math.max(0, 1 - held - cached)) + " free" : "no report yet");
    setText(free, load ? number(load.num_blocks) + " blocks · fragmentation "
      + load.fragmentation.toFixed(2) : "");
  }

  return { root: root, update: update };
}

function stateOf(node, store) {
  let text = node.state;
  if (node.next_role) text += " to " + node.next_role;
  if (node.reported_s !== null) {
    const age = store.nowS - node.reported_s;
    if (age > 2) text += ", last report " + ago(age);
  }
  return text;
}

function scoresOf(node) {
  const parts = [];
  if (node.role !== "decode") parts.push("C prefill " + node.prefill_load.toFixed(2));
  if (node.role !== "prefill") parts.push("C decode " + node.decode_load.toFixed(2));
  if (node.decode_step_s) parts.push("step " + seconds(node.decode_step_s));
  return parts.join(" · ");
}

// Returns the share in use.
function drawPool(pool, cells, node) {
  const shares = node.pool_map.match(/../g) || [];
  setAttribute(pool, "viewBox", "0 0 " + Math.max(1, shares.length) + " " + POOL_HEIGHT);
  let d = "";
  let used = 0;
  shares.forEach((hex, i) => {
    const share = parseInt(hex, 16) / 255;
    used += share;
    if (share > 0) {
      const height = round(Math.max(1.5, share * POOL_HEIGHT));
      d += "M" + i + " " + POOL_HEIGHT + "v-" + height + "h1v" + height + "z";
    }
  });
  setAttribute(cells, "d", d);
  setAttribute(pool, "aria-label", shares.length
    ? "Pool of " + node.name + ": " + percent(used / shares.length) + " in use, in "
      + shares.length + " slices" : "Pool of " + node.name + ": not told");
  return shares.length ? used / shares.length : 0;
}
