// The life of a lease in lanes, one below the other: where its time went, and which versions were published meanwhile.
import { el, number, seconds } from "./dom.js";

const WIDTH = 1000, HEIGHT = 18;
const TITLES = {
  queue: "granted, and no turn asked for yet",
  opening: "no turn asked for yet; when it was granted is not known",
  score: "its verifiers were asked",
  delivery: "its group on the way to the learner",
  buffer: "accepted, and not taken by a batch",
  step: "taken by a batch, trained and copied",
};

function shape(tag, given, title = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, String(value));
  if (title) {
    const told = document.createElementNS("http://www.w3.org/2000/svg", "title");
    told.textContent = title;
    made.append(told);
  }
  return made;
}

const from = (begin, end) => `${seconds(begin)} to ${seconds(end)}`;

function bar(one, i, { name, bars }, whole, chosen) { // of several trajectories each has its own height
  const height = HEIGHT / bars.length,
    who = one.place == null ? "" : `, trajectory ${one.place}`,
    by = one.versions.length ? `, version ${one.versions.join(", ")} by ${one.generators.join(", ") || "–"}` : "",
    own = one.place != null && one.place === chosen;
  return shape("rect", {
    x: (WIDTH * one.begin) / whole,
    y: i * height,
    width: Math.max(2, (WIDTH * (one.end - one.begin)) / whole),
    height: Math.max(1, height - (bars.length > 1 && height > 2 ? 1 : 0)),
    class: own ? "own" : `of-${name.split(" ")[0]}`,
  }, `${name}${who}: ${from(one.begin, one.end)}${by}`);
}

function said({ name, bars }) {
  const begin = Math.min(...bars.map((one) => one.begin)), end = Math.max(...bars.map((one) => one.end));
  return `${name} ${from(begin, end)}`;
}

function absent(missing) { // lanes that are not there, by the reason
  const found = new Map();
  for (const [name, why] of missing) found.set(why, [...(found.get(why) ?? []), name]);
  return [...found].map(([why, names]) => [names, why]);
}

// `chosen` is the place of the trajectory that the reader came for.
export function lanes(life, chosen = null) {
  const whole = life.seconds || 1,
    ticks = () =>
      life.published.map(([, at]) =>
        shape("line", { x1: at / whole * WIDTH, x2: at / whole * WIDTH, y1: 0, y2: HEIGHT, class: "tick" })
      );
  const rows = life.lanes.map((lane) => {
    const drawn = shape("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
    drawn.append(...lane.bars.map((one, i) => bar(one, i, lane, whole, chosen)), ...ticks());
    const took = Math.max(...lane.bars.map((one) => one.end)) - Math.min(...lane.bars.map((one) => one.begin));
    return el(
      "div",
      { class: "lane" },
      el("span", { title: TITLES[lane.name] ?? "sampling, a bar for each trajectory" }, lane.name),
      drawn,
      el("span", { class: "soft" }, seconds(took)),
    );
  });
  const versions = life.published.map(([version, at]) => `version ${number(version)} after ${seconds(at)}`);
  return el(
    "details",
    { class: "card life", open: true },
    el("summary", {}, "Life of its lease", rows.length ? `, ${seconds(life.seconds)}` : ""),
    rows.length
      ? el("div", { class: "lanes", role: "img", "aria-label": life.lanes.map(said).join(", ") }, rows)
      : null,
    versions.length ? el("p", { class: "soft" }, `Published meanwhile, as lines: ${versions.join(", ")}.`) : null,
    absent(life.missing).map(([names, why]) => el("p", { class: "soft" }, `Not drawn: ${names.join(", ")}; ${why}.`)),
  );
}
