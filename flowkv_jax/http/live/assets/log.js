// Why things happened: decisions with their terms. Entries stay as they are while one is open.

const NUM_ENTRIES = 60;
const KIND_NAMES = { route: "route", role: "role", scale: "scale", regime: "regime", node: "node",
  failover: "failover" };

function makeLogPanel() {
  const events = makeLog(byId("events"), "Nothing but routes has been decided yet.");
  const routes = makeLog(byId("routes"), "No request has been routed yet.");

  function update(store) {
    events.show(eventsOf(store), store);
    const decided = store.decisions.filter((decision) => decision.kind === "route");
    routes.show(decided.slice(-NUM_ENTRIES).reverse(), store);
    setText(byId("routes-note"), routes.isHeld() ? "held while one is open"
      : "why each sequence went where");
  }

  return { update: update };
}

function eventsOf(store) {
  const events = store.decisions.filter((decision) => decision.kind !== "route");
  for (const record of store.records) {
    for (const [i, lost] of record.lost_places.entries()) {
      events.push({ number: record.sequence_id + "/" + record.number + "/" + i, kind: "failover",
        time_s: lost.time_s, subject: record.sequence_id, candidates: [], terms: {},
        chosen: record.decode_node ? "went on at " + record.decode_node : "given up",
        reason: (lost.node || "no node") + " failed it: " + lost.reason });
    }
  }
  events.sort((a, b) => b.time_s - a.time_s);
  return events.slice(0, NUM_ENTRIES);
}

function makeLog(place, emptyText) {
  const empty = el("p", { class: "empty", text: emptyText });
  place.append(empty);
  const shown = new Map();

  function isHeld() { return place.querySelector("details[open]") !== null; }

  function show(entries, store) {
    for (const entry of shown.values()) entry.refresh(store);
    if (isHeld()) return;
    empty.hidden = entries.length > 0;
    const wanted = new Set(entries.map(keyOf));
    for (const [key, entry] of shown) {
      if (wanted.has(key)) continue;
      entry.root.remove();
      shown.delete(key);
    }
    let before = place.firstChild;
    for (const decision of entries) {
      const key = keyOf(decision);
      let entry = shown.get(key);
      if (!entry) {
        entry = makeEntry(decision);
        shown.set(key, entry);
      }
      if (entry.root === before) before = before.nextSibling;
      else place.insertBefore(entry.root, before);
      entry.refresh(store);
    }
  }

  return { show: show, isHeld: isHeld };
}

function keyOf(decision) { return decision.kind + decision.number; }

function makeEntry(decision) {
  const when = el("span", { class: "muted" });
  const summary = el("summary", {}, when, el("span", { class: "kind", text: KIND_NAMES[decision.kind]
    || decision.kind }), el("span", { class: "what" },
  el("span", { class: "id", text: shortId(decision.subject), title: decision.subject }),
  " → ", el("b", { text: decision.chosen.replaceAll("->", "→") }), " ", el("span", { class: "why", text: decision.reason })));
  const body = el("div", { class: "body" });
  const root = el("details", { "data-kind": decision.kind }, summary, body);
  root.addEventListener("toggle", () => {
    if (root.open && !body.firstChild) body.append(termsOf(decision));
  });
  return {
    root: root,
    refresh: (store) => {
      setText(when, ago(store.nowS - decision.time_s));
      setAttribute(when, "title", clockTime(store.unixMs(decision.time_s)));
    },
  };
}

function termsOf(decision) {
  const rows = decision.candidates.map((one) => el("tr", {},
    el("td", { text: one.purpose }), el("td", { text: one.name }),
    el("td", { class: "num", text: seconds(one.cost_s) }),
    el("td", { text: termText(one.terms) })));
  const parts = el("div", {});
  const own = termText(decision.terms);
  if (own) parts.append(el("p", { text: own }));
  if (rows.length) {
    parts.append(el("table", {}, el("thead", {}, el("tr", {}, ...["for", "node", "cost", "made of"]
      .map((text) => el("th", { scope: "col", text: text })))), el("tbody", {}, ...rows)));
  }
  if (!parts.firstChild) parts.append(el("p", { class: "muted", text: "No terms." }));
  return parts;
}

function termText(terms) {
  return Object.entries(terms).map(([name, value]) => name.endsWith("_s")
    ? name.slice(0, -2).replaceAll("_", " ") + " " + seconds(value)
    : name.replaceAll("_", " ") + " " + number(value)).join(", ");
}
