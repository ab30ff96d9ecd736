// Numbers as people read them. Missing ones are an en dash.

const NONE = "–";

function digits(value, places) {
  return value.toLocaleString("en-US", {
    minimumFractionDigits: places, maximumFractionDigits: places });
}

// Three significant digits or so, never an exponent.
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 100) return digits(value, 0);
  return digits(value, size >= 10 ? 1 : 2);
}

function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 100) return digits(value, 0) + " s";
  if (size >= 1) return digits(value, size >= 10 ? 1 : 2) + " s";
  const ms = value * 1000;
  return digits(ms, Math.abs(ms) >= 100 ? 0 : Math.abs(ms) >= 10 ? 1 : 2) + " ms";
}

function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return digits(value, unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2) + " " + units[unit];
}

function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  const value = share * 100;
  return digits(value, value >= 9.95 || value === 0 ? 0 : value >= 0.095 ? 1 : 2) + " %";
}

function ago(value) {
  const s = Math.max(0, value);
  if (s < 60) return digits(s, 0) + " s ago";
  if (s < 3600) return Math.floor(s / 60) + " min ago";
  return Math.floor(s / 3600) + " h ago";
}

function plural(count, one, many) {
  return number(count) + " " + (count === 1 ? one : many || one + "s");
}

function clockTime(unixMs) {
  return new Date(unixMs).toLocaleTimeString([], { hour12: false });
}

function shortId(text) {
  return text.length > 20 ? text.slice(0, 9) + "…" + text.slice(-9) : text;
}
