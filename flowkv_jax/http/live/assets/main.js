// Puts the panels together and keeps them fed.

const FIGURE_SPAN_S = 30;

function showFigures(store) {
  if (!store.cluster) return;
  const recent = store.recent(FIGURE_SPAN_S);
  const handoffs = store.handoffs.filter((one) => one.handed_off_s >= store.nowS - FIGURE_SPAN_S);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const regime = byId("fig-regime");
  setText(regime, store.isAlone ? "one node" : store.cluster.regime);
  setAttribute(regime, "data-regime", store.cluster.regime);
  setText(byId("fig-requests"), number(recent.length / FIGURE_SPAN_S));
  setText(byId("fig-tokens"), number(sum(recent.map((one) => one.num_output_tokens)) / FIGURE_SPAN_S));
  setText(byId("fig-ttft"), seconds(quantile(known(recent.map(ttftOf)), 0.5)));
  setText(byId("fig-tpot"), seconds(quantile(known(recent.map(tpotOf)), 0.5)));
  const moved = sum(handoffs.map((one) => one.handoff.data_bytes)) / FIGURE_SPAN_S;
  setText(byId("fig-handoffs"), store.isAlone ? NONE : number(handoffs.length / FIGURE_SPAN_S));
  setText(byId("fig-bytes"), store.isAlone ? NONE : bytes(moved) + "/s");
  setText(byId("model"), store.told.model);
  setText(byId("version"), "flowkv-jax " + store.told.version);
  document.title = "FlowKV · " + store.told.model;
}

function start() {
  const store = new Store();
  const panels = [makeNodesPanel(), makeScoresPanel(), makeLinksPanel(), makeHandoffsPanel(),
    makeLatencyPanel(), makeLogPanel()];
  const form = byId("key-form");
  const main = byId("main");

  function tell(state, text, detail) {
    setAttribute(byId("status"), "data-state", state);
    setAttribute(document.body, "data-state", state);
    setText(byId("status-text"), text);
    setText(byId("status-detail"), detail);
    const needsKey = state === "key";
    if (needsKey !== !form.hidden) {
      form.hidden = !needsKey;
      main.hidden = needsKey;
      if (needsKey) byId("key").focus();
    }
    if (needsKey) setText(byId("key-error"), poller.key ? "The server does not know this key." : "");
  }

  const poller = new Poller(store, () => {
    showFigures(store);
    for (const panel of panels) panel.update(store);
  }, tell);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    poller.useKey(byId("key").value.trim());
    byId("key").value = "";
  });
  byId("pause").addEventListener("click", (event) => {
    const isPaused = event.currentTarget.getAttribute("aria-pressed") !== "true";
    setAttribute(event.currentTarget, "aria-pressed", isPaused);
    poller.pause(isPaused);
  });
  poller.ask();
}

start();
