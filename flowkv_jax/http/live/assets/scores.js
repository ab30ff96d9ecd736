// Load scores over time: the role as a whole (thick) and its nodes (thin), with the thresholds as
// bands, the regime as a strip, and role switches as marks.

const SPANS = [["2 min", 120], ["5 min", 300], ["15 min", 900]];
const PLOT = { height: 96, left: 30, right: 8, top: 6, bottom: 4 };
const DASHES = ["", "4 2", "1.5 2", "6 2 1.5 2", "8 3"];
const ROLES = [
  { role: "prefill", title: "prefill", field: "prefill_load" },
  { role: "decode", title: "decode", field: "decode_load" },
];

function makeScoresPanel() {
  const place = byId("scores");
  let span = SPANS[1][1];
  let cursor = null;  // seconds before the newest sample; null for the newest
  let store = null;
  const buttons = SPANS.map(([label, value]) => el("button", {
    type: "button", text: label, "aria-pressed": String(value === span),
    onclick: () => choose(value) }));
  byId("span-tools").append(...buttons);
  const plots = ROLES.map((role) => makeScorePlot(place, role));
  const axis = chart(place, 34, "Regime over time");
  const readout = el("p", { class: "readout" });
  place.append(readout);
  for (const plot of [...plots.map((one) => one.chart), axis]) {
    plot.redraw = draw;
    plot.root.addEventListener("pointermove", (event) => point(event, plot));
    plot.root.addEventListener("pointerleave", () => { cursor = null; draw(); });
  }
  setAttribute(axis.root, "tabindex", "0");
  setAttribute(axis.root, "aria-label", "Time: left and right arrow keys move the cursor");
  axis.root.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (!step && event.key !== "Escape") return;
    event.preventDefault();
    const moved = (cursor || 0) + (step || 0) * span / 60;
    cursor = event.key === "Escape" || moved <= 0 ? null : Math.min(span, moved);
    draw();
  });

  function choose(value) {
    span = value;
    SPANS.forEach(([, other], i) => setAttribute(buttons[i], "aria-pressed", other === value));
    cursor = null;
    draw();
  }

  function point(event, plot) {
    const box = plot.root.getBoundingClientRect();
    const share = (event.clientX - box.left - PLOT.left) / (plot.width - PLOT.left - PLOT.right);
    cursor = share >= 0 && share <= 1 ? (1 - share) * span : null;
    draw();
  }

  function draw() {
    if (!store || !store.cluster) return;
    const nowS = store.nowS;
    const samples = store.samples.filter((sample) => sample.time_s >= nowS - span - 2);
    const switches = store.decisions.filter((decision) => decision.kind === "role"
      && decision.time_s >= nowS - span);
    const view = { nowS: nowS, span: span, cursor: cursor, cluster: store.cluster };
    for (const plot of plots) plot.draw(view, samples, switches);
    drawAxis(axis, view, samples);
    const at = cursor === null ? nowS : nowS - cursor;
    readout.replaceChildren(...readoutOf(store, samples, at, switches));
  }

  return { update: function (news) { store = news; draw(); } };
}

function xOf(view, width, timeS) {
  const inner = width - PLOT.left - PLOT.right;
  return PLOT.left + Math.max(0, 1 - (view.nowS - timeS) / view.span) * inner;
}

function yOf(load) {
  const inner = PLOT.height - PLOT.top - PLOT.bottom;
  return PLOT.top + (1 - Math.min(1, Math.max(0, load))) * inner;
}

function makeScorePlot(place, kind) {
  const drawing = chart(place, PLOT.height, "Load of " + kind.title);
  setAttribute(drawing.root, "data-role", kind.role);

  function draw(view, samples, switches) {
    const width = drawing.width;
    if (!width) return;
    const parts = bands(view, width);
    for (const [i, name] of namesOf(samples, kind.role).entries()) {
      const points = samples.map((sample) => {
        const node = sample.nodes.find((one) => one.name === name && serves(one, kind.role));
        return node ? [xOf(view, width, sample.time_s), yOf(node[kind.field])] : null;
      });
      parts.push(svg("path", { class: "line", d: pathWithGaps(points),
        "stroke-dasharray": dashOf(i) }));
    }
    if (view.cluster.nodes.length > 1) {
      const whole = samples.map((sample) => [xOf(view, width, sample.time_s),
        yOf(sample[kind.field])]);
      parts.push(svg("path", { class: "line thick", d: path(whole) }));
    }
    for (const change of switches) {
      const x = round(xOf(view, width, change.time_s));
      parts.push(svg("path", { class: "switch", d: "M" + x + " " + PLOT.top + "V"
        + (PLOT.height - PLOT.bottom) }));
      parts.push(svg("path", { class: "switch-mark", d: "M" + x + " 1l5 5l-5 5l-5 -5z" },
        svg("title", { text: change.subject + " becomes " + change.chosen })));
    }
    parts.push(...cursorLine(view, width, PLOT.height), ...labels(kind, width - PLOT.right));
    drawing.root.replaceChildren(...parts);
    const last = samples.length ? samples[samples.length - 1][kind.field] : 0;
    setAttribute(drawing.root, "aria-label", "Load of " + kind.title + ", now " + number(last));
  }

  return { chart: drawing, draw: draw };
}

function serves(node, role) { return node.role === role || node.role === "hybrid"; }

function namesOf(samples, role) {
  const names = new Set();
  for (const sample of samples) {
    for (const node of sample.nodes) if (serves(node, role)) names.add(node.name);
  }
  return [...names].sort();
}

function pathWithGaps(points) {
  let d = "";
  let isOpen = false;
  for (const at of points) {
    if (at) d += (isOpen ? "L" : "M") + round(at[0]) + " " + round(at[1]);
    isOpen = at !== null;
  }
  return d;
}

function bands(view, width) {
  const { role_load_low: low, role_load_high: high } = view.cluster;
  const right = width - PLOT.right;
  const parts = [
    svg("rect", { class: "band-high", x: PLOT.left, y: yOf(1), width: right - PLOT.left,
      height: yOf(high) - yOf(1) }),
    svg("rect", { class: "band-low", x: PLOT.left, y: yOf(low), width: right - PLOT.left,
      height: yOf(0) - yOf(low) }),
  ];
  for (const level of [0, 1]) {
    parts.push(svg("path", { class: "axis", d: "M" + PLOT.left + " " + yOf(level) + "H" + right }));
  }
  for (const level of [low, high]) {
    parts.push(svg("path", { class: "edge", d: "M" + PLOT.left + " " + yOf(level) + "H" + right }));
  }
  for (const [level, y] of [[0, yOf(0)], [low, yOf(low) + 4], [high, yOf(high) + 4], [1, yOf(1) + 8]]) {
    parts.push(svg("text", { x: PLOT.left - 5, y: y, "text-anchor": "end",
      text: level === 0 || level === 1 ? String(level) : level.toFixed(2) }));
  }
  return parts;
}

function labels(kind, right) {
  return [
    svg("text", { class: "strong", x: PLOT.left + 6, y: 19, text: "C " + kind.title }),
    svg("text", { x: right - 4, y: yOf(1) + 13, "text-anchor": "end", text: "overloaded" }),
    svg("text", { x: right - 4, y: yOf(0) - 5, "text-anchor": "end", text: "idle" }),
  ];
}

function cursorLine(view, width, height) {
  if (view.cursor === null) return [];
  const x = round(xOf(view, width, view.nowS - view.cursor));
  return [svg("path", { class: "cursor", d: "M" + x + " 0V" + height })];
}

function drawAxis(axis, view, samples) {
  const width = axis.width;
  if (!width) return;
  const parts = [];
  samples.forEach((sample, i) => {
    const x = xOf(view, width, sample.time_s);
    const next = i + 1 < samples.length ? xOf(view, width, samples[i + 1].time_s)
      : width - PLOT.right;
    const height = { normal: 4, imbalanced: 8, extreme: 12 }[sample.regime];
    parts.push(svg("rect", { class: "regime-" + sample.regime, x: round(x), y: 14 - height,
      width: round(Math.max(1, next - x + 0.5)), height: height }));
  });
  const minutes = view.span / 60;
  const fits = (width - PLOT.left) / 72;
  const step = [0.5, 1, 2.5, 3, 5].find((one) => minutes / one <= fits) || minutes;
  for (let at = 0; at <= minutes; at += step) {
    const x = xOf(view, width, view.nowS - at * 60);
    if (x < PLOT.left + 74 && at < minutes) continue;
    parts.push(svg("text", { x: round(x), y: 29, text: at === 0 ? "now" : "−" + at + " min",
      "text-anchor": at === 0 ? "end" : at === minutes ? "start" : "middle" }));
  }
  parts.push(...cursorLine(view, width, 16));
  axis.root.replaceChildren(...parts);
}

function readoutOf(store, samples, timeS, switches) {
  let best = null;
  for (const sample of samples) {
    if (!best || Math.abs(sample.time_s - timeS) < Math.abs(best.time_s - timeS)) best = sample;
  }
  if (!best) return ["No sample yet."];
  const when = store.nowS - best.time_s < 1 ? "Now" : clockTime(store.unixMs(best.time_s));
  const parts = [when + ": "];
  if (store.isAlone) parts.push("one node, so no policy and no regime");
  else {
    parts.push(el("b", { text: best.regime }), ", prefill ", el("b", { text: load(best.prefill_load) }),
      ", decode ", el("b", { text: load(best.decode_load) }));
  }
  for (const node of best.nodes) {
    const scores = ROLES.filter((kind) => serves(node, kind.role))
      .map((kind) => node[kind.field].toFixed(2)).join(" / ");
    parts.push(" · ", ...ROLES.filter((kind) => serves(node, kind.role))
      .map((kind) => lineSample(kind.role, namesOf(samples, kind.role).indexOf(node.name))),
    node.name + " ", el("b", { text: scores }));
  }
  if (switches.length) parts.push(" · ◆ " + plural(switches.length, "change of role", "changes of role"));
  return parts;
}

function lineSample(role, index) {
  return svg("svg", { class: "sample", width: 18, height: 8, "data-role": role, "aria-hidden": "true" },
    svg("path", { class: "line", d: "M0 4H16", "stroke-dasharray": dashOf(index) }));
}

function dashOf(index) { return DASHES[(index + 1) % DASHES.length]; }

function load(value) { return value > 1 ? "nobody" : value.toFixed(2); }
