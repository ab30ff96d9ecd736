// Elements of HTML and SVG. Text is always set as text: nothing that a client named can be markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function byId(id) { return document.getElementById(id); }

// Only where it differs, so that screen readers and selections are left alone.
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function round(value) { return Math.round(value * 10) / 10; }

// A drawing as wide as its place and `height` high, in pixels; drawn anew when the width changes.
function chart(place, height, label) {
  const root = svg("svg", { class: "chart", height: height, role: "img", "aria-label": label });
  place.append(root);
  const made = { root: root, width: 0, height: height, redraw: null };
  new ResizeObserver(function () {
    const width = Math.floor(root.clientWidth);
    if (width === made.width || width === 0) return;
    made.width = width;
    root.setAttribute("viewBox", "0 0 " + width + " " + made.height);
    if (made.redraw) made.redraw();
  }).observe(root);
  made.setHeight = function (pixels) {
    if (pixels === made.height) return;
    made.height = pixels;
    root.setAttribute("height", pixels);
    root.setAttribute("viewBox", "0 0 " + made.width + " " + pixels);
  };
  return made;
}

function path(points) {
  let d = "";
  for (const [x, y] of points) d += (d ? "L" : "M") + round(x) + " " + round(y);
  return d;
}

// Of a sorted array; null if it is empty.
function quantile(sorted, share) {
  if (!sorted.length) return null;
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(share * sorted.length) - 1))];
}
