// Histograms of latencies, on a logarithmic scale, of the sequences that ended lately.

const LATENCY_SPAN_S = 300;
const STEPS_PER_DECADE = 6;
const HIST = { height: 126, top: 16, bottom: 18 };
const LEAST_S = 1e-5;

function makeLatencyPanel() {
  const place = byId("latency");
  const panels = [
    makeHistogram(place, "prefill", "TTFT", "arrival to first token"),
    makeHistogram(place, "decode", "ITL", "from a token to the next"),
    makeHistogram(place, "decode", "TPOT", "mean of a sequence's ITL"),
    makeHistogram(place, "decode", "End to end", "arrival to last token"),
  ];

  function update(store) {
    const records = store.recent(LATENCY_SPAN_S).filter((record) => record.finish_reason !== "error");
    setText(byId("latency-note"), "of " + plural(records.length, "sequence")
      + " that ended in the last 5 minutes");
    panels[0].show(ofValues(known(records.map(ttftOf))));
    panels[1].show(ofGaps(store));
    panels[2].show(ofValues(known(records.map(tpotOf))));
    panels[3].show(ofValues(known(records.map((record) => record.ended_s - record.arrival_s))));
  }

  return { update: update };
}

// Bars are [from, to, count], in seconds; `at(share)` is a quantile.

function ofValues(sorted) {
  const bars = [];
  for (const value of sorted) {
    const bucket = Math.floor(Math.log10(Math.max(value, LEAST_S)) * STEPS_PER_DECADE);
    const last = bars[bars.length - 1];
    if (last && last.bucket === bucket) last[2] += 1;
    else bars.push(Object.assign([edge(bucket), edge(bucket + 1), 1], { bucket: bucket }));
  }
  return { bars: bars, count: sorted.length, about: "", at: (share) => quantile(sorted, share) };
}

function edge(bucket) { return Math.pow(10, bucket / STEPS_PER_DECADE); }

// Counted by the server in coarse buckets: what was added in the time shown.
function ofGaps(store) {
  const samples = store.samples;
  const none = { bars: [], count: 0, about: "", at: () => null };
  if (!samples.length) return none;
  const from = store.nowS - LATENCY_SPAN_S;
  const first = samples.find((sample) => sample.time_s >= from) || samples[0];
  const isAll = samples[0].number === 1 && first === samples[0];
  const now = samples[samples.length - 1].token_gaps;
  const counts = now.map((count, i) => Math.max(0, count - (isAll ? 0 : first.token_gaps[i] || 0)));
  const count = counts.reduce((sum, one) => sum + one, 0);
  if (!count) return none;
  const bounds = store.told.token_gap_bounds_s;
  const lower = (i) => i ? bounds[i - 1] : bounds[0] / 10;
  const upper = (i) => i < bounds.length ? bounds[i] : bounds[i - 1] * 2;
  function at(share) {
    let rest = share * count;
    for (let i = 0; i < counts.length; i += 1) {
      if (rest <= counts[i]) return lower(i) + (upper(i) - lower(i)) * rest / (counts[i] || 1);
      rest -= counts[i];
    }
    return upper(counts.length - 1);
  }
  const bars = counts.map((one, i) => [lower(i), upper(i), one]).filter((bar) => bar[2]);
  return { bars: bars, count: count, about: "about ", at: at };
}

function makeHistogram(place, role, name, meaning) {
  const figures = el("p", { text: "no data yet" });
  const root = el("div", { class: "hist", "data-role": role },
    el("h3", { text: name }, el("i", { text: meaning })), figures);
  place.append(root);
  const drawing = chart(root, HIST.height, name);
  let shown = null;
  drawing.redraw = draw;

  function draw() {
    if (drawing.width && shown) drawing.root.replaceChildren(...histogram(shown, drawing.width));
  }

  return {
    show: function (distribution) {
      shown = distribution;
      const text = shown.count ? [[0.5, "p50"], [0.9, "p90"], [0.99, "p99"]]
        .map(([share, label]) => label + " " + seconds(shown.at(share))).join(" · ") : "no data yet";
      setText(figures, shown.count ? shown.about + text : text);
      setAttribute(drawing.root, "aria-label", name + ", " + meaning + ": " + text);
      draw();
    },
  };
}

function histogram(shown, width) {
  const bottom = HIST.height - HIST.bottom;
  const parts = [svg("path", { class: "axis", d: "M0 " + bottom + "H" + width })];
  if (!shown.count) return parts;
  const log = (value) => Math.log10(Math.max(value, LEAST_S));
  const low = Math.floor(log(shown.bars[0][0]) + 1e-9);
  const high = Math.max(low + 1, Math.ceil(log(shown.bars[shown.bars.length - 1][1]) - 1e-9));
  const x = (value) => (log(value) - low) / (high - low) * width;
  const most = Math.max(...shown.bars.map((bar) => bar[2]));
  let d = "";
  for (const [from, to, count] of shown.bars) {
    const height = Math.max(1, count / most * (bottom - HIST.top));
    d += "M" + round(x(from) + 0.5) + " " + bottom + "v-" + round(height) + "H"
      + round(Math.max(x(to) - 0.5, x(from) + 1)) + "V" + bottom + "z";
  }
  parts.push(svg("path", { class: "bars", d: d }));
  const every = Math.ceil((high - low) * 58 / width);
  for (let power = low; power <= high; power += every) {
    const at = (power - low) / (high - low) * width;
    parts.push(svg("path", { class: "grid", d: "M" + round(at) + " " + HIST.top + "V" + bottom }));
    parts.push(svg("text", { x: round(at), y: HIST.height - 4, text: decadeText(power),
      "text-anchor": power === low ? "start" : power === high ? "end" : "middle" }));
  }
  for (const [share, name] of [[0.5, "p50"], [0.99, "p99"]]) {
    const at = Math.min(width - 1, x(shown.at(share)));
    const isLeft = at > width - 34 || share === 0.5;
    parts.push(svg("path", { class: "mark", d: "M" + round(at) + " 2V" + bottom }));
    parts.push(svg("text", { class: "strong", x: round(at) + (isLeft ? -4 : 4), y: 11,
      "text-anchor": isLeft ? "end" : "start", text: name }));
  }
  return parts;
}

function decadeText(power) {
  if (power >= 0) return Math.pow(10, power) + " s";
  if (power >= -3) return Math.pow(10, power + 3) + " ms";
  return Math.pow(10, power + 6) + " µs";
}
