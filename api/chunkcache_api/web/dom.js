/** Building what is shown. Text from elsewhere goes in by textContent and nowhere else. */

export const byId = (id) => document.getElementById(id);

/**
 * An element.
 * @param {string} tag
 * @param {Record<string, unknown>} attributes  `class`, `text`, `onclick`, or an attribute.
 * @param {...(Node|string|null)} children  Strings become text.
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = String(value);
    else if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const count = (n) => n.toLocaleString("en");

export function milliseconds(ms) {
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${count(Math.round(ms))} ms` : `${ms.toFixed(1)} ms`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export const percent = (ratio) => (ratio === null ? "–" : `${(ratio * 100).toFixed(1)} %`);

export const when = (seconds) => new Date(seconds * 1000).toLocaleString();

/** Pairs of a name and a value, as a list of definitions. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null);
  return el(
    "dl",
    { class: "facts" },
    ...shown.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))),
  );
}
