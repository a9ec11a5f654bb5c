// Elements, numbers and requests. Text only ever enters the page as text: a completion may hold anything.

/** @param {string} id */
export const $ = (id) => /** @type {PageElement} */ (document.getElementById(id));

export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function number(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.001 ? value.toExponential(1) : value.toPrecision(Math.max(digits, 1));
}

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${value.toPrecision(3)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const share = (
  value,
) => (value == null || Number.isNaN(value) ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);

export class NeedsToken extends Error {}

// `given` by name, or as pairs where a name stands more than once.
export async function ask(path, given = {}) {
  const asked = (Array.isArray(given) ? given : Object.entries(given)).filter(([, value]) =>
    value != null && value !== ""
  );
  const answer = await fetch(`/page/data/${path}?${new URLSearchParams(asked)}`, { credentials: "same-origin" });
  if (answer.status === 401) throw new NeedsToken();
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `HTTP ${answer.status}`);
  return body;
}

export function table(target, head, rows, classes = []) {
  target.replaceChildren(
    el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, rows.map((row, i) => el("tr", { class: classes[i] ?? "" }, row.map((cell) => el("td", {}, cell))))),
  );
}

// The view and its parameters are in the address behind the #, so that each view can be sent.
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "run", given: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(view, given) {
  const kept = Object.entries(given).filter(([, value]) => value != null && value !== "");
  const query = new URLSearchParams(kept).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

// The numbers of the runs beside the first.
export const besides = (given) => (given.with ?? "").split(",").filter((each) => each !== "");
