// What the server has told so far, and the one who asks it.

const KEEP = { samples: 900, records: 2000, decisions: 800 };
const KEY_NAME = "flowkv-api-key";

class Store {
  constructor() { this.reset(); }

  reset() {
    this.instance = "";
    this.marks = {};
    this.cluster = null;
    this.samples = [];
    this.records = [];
    this.decisions = [];
    this.handoffs = [];
    this.told = {};
    this.intervalS = 1;
  }

  take(state) {
    if (state.instance !== this.instance) this.reset();
    this.instance = state.instance;
    this.marks = state.marks;
    this.cluster = state.cluster;
    this.told = state;
    this.intervalS = state.interval_s;
    this.receivedMs = performance.now();
    const named = (fields, row) => Object.fromEntries(fields.map((name, i) => [name, row[i]]));
    for (const row of state.samples) {
      const sample = named(state.fields.sample, row);
      sample.nodes = sample.nodes.map((node) => named(state.fields.node, node));
      this.samples.push(sample);
    }
    this.records.push(...state.records);
    this.decisions.push(...state.decisions);
    for (const [kind, most] of Object.entries(KEEP)) {
      if (this[kind].length > most) this[kind].splice(0, this[kind].length - most);
    }
    this.handoffs = this.records.filter((one) => one.handoff && one.handed_off_s !== null)
      .sort((a, b) => b.handed_off_s - a.handed_off_s);
  }

  // The server's clock: as it was when it last looked at the cluster.
  get nowS() { return this.cluster ? this.cluster.now_s : 0; }

  // One node that does everything, and never had company as far as is remembered.
  get isAlone() {
    return this.cluster !== null && this.cluster.nodes.length === 1
      && this.cluster.nodes[0].home_role === "hybrid" && !this.handoffs.length
      && this.samples.every((sample) => sample.nodes.length <= 1);
  }

  unixMs(timeS) { return this.told.unix_ms - (this.nowS - timeS) * 1000; }

  // Records of the last seconds.
  recent(spanS) {
    const from = this.nowS - spanS;
    return this.records.filter((record) => record.ended_s >= from);
  }
}

function ttftOf(record) {
  return record.queue_s === null || record.prefill_s === null
    ? null : record.queue_s + record.prefill_s;
}

function tpotOf(record) {
  return record.decode_s === null || record.num_output_tokens < 2
    ? null : record.decode_s / (record.num_output_tokens - 1);
}

function known(values) {
  return values.filter((value) => value !== null && value >= 0).sort((a, b) => a - b);
}

// Asks again and again. `tell(state, text, detail)` hears how that goes.
// States: connecting, live, paused, stale, off, key.
class Poller {
  constructor(store, onNews, tell) {
    this.store = store;
    this.onNews = onNews;
    this.tell = tell;
    this.isPaused = false;
    this.isAsking = false;
    this.timer = null;
    this.succeededMs = null;
    this.failure = null;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.ask(); });
    setInterval(() => this.say(), 1000);
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.say();
    if (!isPaused) this.ask();
  }

  get key() { return sessionStorage.getItem(KEY_NAME) || ""; }

  useKey(key) {
    sessionStorage.setItem(KEY_NAME, key);
    this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    if (this.isAsking || this.isPaused || document.hidden) return;
    this.isAsking = true;
    let waitMs = this.store.intervalS * 1000;
    try {
      const response = await fetch(this.address(), {
        headers: this.key ? { Authorization: "Bearer " + this.key } : {},
        cache: "no-store", credentials: "omit", redirect: "error",
        signal: AbortSignal.timeout(10000),
      });
      if (response.status === 401) {
        this.failure = "key";
        this.tell("key", this.key ? "key not accepted" : "key needed", "");
        return;
      }
      if (!response.ok) throw new Error(await reasonOf(response));
      this.store.take(await response.json());
      this.failure = null;
      this.succeededMs = performance.now();
      this.say();
      this.onNews();
    } catch (error) {
      this.failure = error.name === "TypeError" ? "no connection" : error.message;
      waitMs = 2000;
      this.say();
    } finally {
      this.isAsking = false;
      if (this.failure !== "key") this.timer = setTimeout(() => this.ask(), waitMs);
    }
  }

  address() {
    const query = new URLSearchParams({ instance: this.store.instance, ...this.store.marks });
    return "live/state?" + query;
  }

  say() {
    const ageS = this.succeededMs === null ? null : (performance.now() - this.succeededMs) / 1000;
    if (this.failure === "key") return;
    if (this.failure !== null) {
      const seen = ageS === null ? "" : "last seen " + ago(ageS) + "; ";
      this.tell("off", "disconnected", seen + this.failure + "; trying again");
    } else if (this.isPaused) this.tell("paused", "paused", ago(ageS || 0));
    else if (ageS === null) this.tell("connecting", "connecting", "");
    else if (ageS > 3 * this.store.intervalS + 2) this.tell("stale", "no news", "since " + ago(ageS));
    else this.tell("live", "live", "");
  }
}

async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch (error) {
    return "HTTP " + response.status;
  }
}
