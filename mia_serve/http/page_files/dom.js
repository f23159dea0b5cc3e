// Makes elements. Every text goes in as a text node: nothing here, or that uses it, parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "css") for (const [name, to] of Object.entries(value)) node.style.setProperty(name, to);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** Make an HTML element; `css` sets style properties (style attributes are refused by the page's policy). */
export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

/** Make an SVG element. */
export const shape = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

export const clip = (text, most) => {
  const points = [...text.slice(0, 2 * most + 2)]; // whole characters: an emoji is never cut in two
  return points.length > most ? points.slice(0, most).join("").trimEnd() + "…" : text;
};

/** Return a text without runs of empty lines, which a book has between chapters. */
export const readable = (text) => text.trim().replace(/\n\s*\n\s*\n+/g, "\n\n");

export const number = (value, digits = 3) =>
  typeof value === "number" && Number.isFinite(value) ? value.toFixed(digits).replace(/^(-?)0\./, "$1.") : "–";

/** Show a text near the pointer while it is over a node. */
export function tip(node, words) {
  const box = byId("tip");
  node.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    box.textContent = words();
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    const below = event.clientY + 18;
    box.style.top = `${below + height > innerHeight ? Math.max(8, event.clientY - height - 12) : below}px`;
  });
  node.addEventListener("pointerleave", () => (box.hidden = true));
}
