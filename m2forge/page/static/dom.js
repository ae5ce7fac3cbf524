// Elements from names, attributes and children. Text is only inserted as text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  return dress(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, name), attributes, children);
}

function dress(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, item]) => node.style.setProperty(key, item));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function empty(title, ...words) {
  return el("div", { class: "empty" }, el("strong", {}, title), ...words);
}

// One tooltip near the pointer, for curves, cells and tokens.
const tipBox = el("div", { class: "tip hidden", role: "tooltip" });

export function showTip(x, y, ...children) {
  if (!tipBox.isConnected) document.body.append(tipBox);
  tipBox.replaceChildren(...children);
  tipBox.classList.remove("hidden");
  const { width, height } = tipBox.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - width - 12 : x + 16;
  const top = y + 14 + height > innerHeight ? y - height - 10 : y + 14;
  tipBox.style.left = `${Math.max(4, left)}px`;
  tipBox.style.top = `${Math.max(4, top)}px`;
}

export function hideTip() {
  tipBox.classList.add("hidden");
}

export function tipRow(colour, name, value) {
  return el("div", { class: "row" }, el("i", { style: { background: colour } }), name, el("b", {}, value));
}
