// Many processes of a kind in a few lines: a summary, and the odd ones.
import { el, number, share } from "./dom.js";

export const MANY = 8;
const SHOWN = 6;
const SILENT_S = 5;

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
};

const known = (found, name) => found.map((one) => one[name]).filter((value) => value != null);

function commonest(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0];
}

/** Tells of each of many whether it is not as most of them are. @param {PeerStatus[]} found */
export function oddOnes(found) {
  const state = commonest(found.map((one) => one.state.replace(/\d+/g, "#"))),
    rate = median(known(found, "tokens_per_s")),
    running = median(known(found, "running")),
    versions = new Set(found.filter((one) => one.version != null).map((one) => one.version));
  const newest = [...versions].sort((a, b) => Number(b.split(".")[1]) - Number(a.split(".")[1])).slice(0, 2);
  return found.filter((one) =>
    one.state.replace(/\d+/g, "#") !== state ||
    (one.last_heard_s ?? 0) > SILENT_S ||
    (one.version != null && !newest.includes(one.version)) ||
    (one.tokens_per_s != null && one.tokens_per_s < rate / 3 && (one.running ?? 0) >= running)
  );
}

/** A line for all of them. @param {PeerStatus[]} found */
export function summary(found) {
  const states = new Map();
  for (const one of found) {
    const kind = one.state.replace(/^\d+ of \d+ /, "");
    states.set(kind, (states.get(kind) ?? 0) + 1);
  }
  const sum = (name) => known(found, name).reduce((total, value) => total + value, 0);
  const idle = known(found, "idle_share"), rates = known(found, "tokens_per_s");
  const held = found.map((one) => /^(\d+) of (\d+) groups/.exec(one.state)).filter((one) => one != null);
  const add = (place) => number(held.reduce((total, one) => total + Number(one[place]), 0));
  return [
    `${number(found.length)}: ${[...states].map(([kind, count]) => `${number(count)} ${kind}`).join(", ")}`,
    held.length ? `${add(1)} of ${add(2)} groups in all` : "",
    rates.length ? `${number(sum("tokens_per_s"))} tokens/s` : "",
    idle.length ? `idle ${share(sum("idle_share") / idle.length)}` : "",
  ].filter((text) => text).join(", ");
}

/** Lines of a card, each with its class: all of a few; of many the summary, the odd ones, and the rest folded.
 * @param {PeerStatus[]} found @param {(one: PeerStatus) => [string, string]} line */
export function crowd(found, line) {
  if (found.length <= MANY) return found.map(line);
  const odd = oddOnes(found), more = odd.length - SHOWN;
  return [
    [summary(found), odd.length ? "slow" : "ok"],
    ...odd.slice(0, SHOWN).map(line),
    ...(more > 0 ? [[`${number(more)} more are odd`, "slow"]] : []),
    [folded(`all ${number(found.length)}`, found.map(line)), ""],
  ];
}

function folded(title, lines) {
  return el(
    "details",
    {},
    el("summary", {}, title),
    el("ul", { class: "all" }, lines.map(([text, state]) => el("li", { class: state ?? "" }, text))),
  );
}
