// Histograms of latencies, on a logarithmic scale, of the sequences that ended lately.

const LATENCY_SPAN_S = 300;
const STEPS_PER_DECADE = 6;
const HIST = { height: 120, top: 8, bottom: 18 };

function makeLatencyPanel() {
  const place = byId("latency");
  const panels = [
    makeHistogram(place, "prefill", "TTFT: arrival to first token"),
    makeHistogram(place, "decode", "TPOT: time per token after the first, a mean a sequence"),
    makeHistogram(place, "decode", "End to end: arrival to last token"),
  ];

  function update(store) {
    const records = store.recent(LATENCY_SPAN_S).filter((record) => record.finish_reason !== "error");
    setText(byId("latency-note"), "of " + plural(records.length, "sequence")
      + " that ended in the last 5 minutes");
    panels[0].show(known(records.map(ttftOf)));
    panels[1].show(known(records.map(tpotOf)));
    panels[2].show(known(records.map((record) => record.ended_s - record.arrival_s)));
  }

  return { update: update };
}

function makeHistogram(place, role, title) {
  const figures = el("p", { text: "no data yet" });
  const root = el("div", { class: "hist", "data-role": role }, el("h3", { text: title }), figures);
  place.append(root);
  const drawing = chart(root, HIST.height, title);
  let values = [];
  drawing.redraw = draw;

  function draw() {
    if (drawing.width) drawing.root.replaceChildren(...histogram(values, drawing.width));
  }

  return {
    show: function (sorted) {
      values = sorted;
      const text = sorted.length ? [[0.5, "p50"], [0.9, "p90"], [0.99, "p99"]]
        .map(([share, name]) => name + " " + seconds(quantile(sorted, share))).join(" · ")
        : "no data yet";
      setText(figures, text);
      setAttribute(drawing.root, "aria-label", title + ": " + text);
      draw();
    },
  };
}

function bucketOf(value) { return Math.floor(Math.log10(Math.max(value, 1e-6)) * STEPS_PER_DECADE); }

function histogram(values, width) {
  const bottom = HIST.height - HIST.bottom;
  const parts = [svg("path", { class: "axis", d: "M0 " + bottom + "H" + width })];
  if (!values.length) return parts;
  const low = Math.floor(bucketOf(values[0]) / STEPS_PER_DECADE) * STEPS_PER_DECADE;
  const top = Math.floor(bucketOf(values[values.length - 1]) / STEPS_PER_DECADE) + 1;
  const count = Math.max(top * STEPS_PER_DECADE - low, STEPS_PER_DECADE);
  const counts = new Array(count).fill(0);
  for (const value of values) counts[Math.min(count - 1, bucketOf(value) - low)] += 1;
  const most = Math.max(...counts);
  const step = width / count;
  let d = "";
  counts.forEach((one, i) => {
    if (!one) return;
    const height = Math.max(1, one / most * (bottom - HIST.top));
    d += "M" + round(i * step + 0.5) + " " + bottom + "v-" + round(height) + "h" + round(step - 1)
      + "V" + bottom + "z";
  });
  parts.push(svg("path", { class: "bars", d: d }));
  for (let decade = 0; decade * STEPS_PER_DECADE <= count; decade += 1) {
    const x = decade * STEPS_PER_DECADE * step;
    parts.push(svg("path", { class: "grid", d: "M" + round(x) + " " + HIST.top + "V" + bottom }));
    parts.push(svg("text", { x: round(x), y: HIST.height - 4, text: decadeText(low / STEPS_PER_DECADE + decade),
      "text-anchor": decade === 0 ? "start" : x > width - 20 ? "end" : "middle" }));
  }
  const x = (value) => (Math.log10(Math.max(value, 1e-6)) * STEPS_PER_DECADE - low) * step;
  for (const [share, name] of [[0.5, "p50"], [0.99, "p99"]]) {
    const at = Math.min(width - 1, x(quantile(values, share)));
    parts.push(svg("path", { class: "mark", d: "M" + round(at) + " " + HIST.top + "V" + bottom }));
    parts.push(svg("text", { class: "strong", x: round(at) + (at > width - 34 ? -4 : 4), y: HIST.top + 8,
      "text-anchor": at > width - 34 ? "end" : "start", text: name }));
  }
  return parts;
}

function decadeText(power) {
  if (power >= 0) return Math.pow(10, power) + " s";
  if (power >= -3) return Math.pow(10, power + 3) + " ms";
  return Math.pow(10, power + 6) + " µs";
}
