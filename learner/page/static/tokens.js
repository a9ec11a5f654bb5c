// Tokens as text, coloured by one of their numbers. Neighbours of one colour are one element; under the pointer, or
// under the cursor of the keyboard, each token tells its own numbers.
import { css, el, number } from "./dom.js";

const gap = (t, i) => (t.learner_logprobs[i] == null ? null : t.learner_logprobs[i] - t.behavior_logprobs[i]);
export const COLORINGS = {
  lag: { title: "Policy version", of: (t, i, step) => Math.max(0, step - 1 - t.versions[i]), kinds: true },
  gap: {
    title: "Logprob gap",
    of: (t, i) => {
      const g = gap(t, i);
      return g == null ? null : Math.abs(g);
    },
    unit: "nats",
  },
  ratio: {
    title: "Ratio",
    of: (t, i) => {
      const g = gap(t, i);
      return g == null ? null : g;
    },
    signed: true,
    shown: (v) => Math.exp(v),
    unit: "",
  },
  advantage: { title: "Advantage", of: (t, i) => t.advantages[i], signed: true, unit: "" },
  entropy: { title: "Entropy", of: (t, i) => t.entropies[i], unit: "nats" },
  logprob: { title: "Logprob", of: (t, i) => -t.behavior_logprobs[i], shown: (v) => -v, unit: "nats" },
  turn: { title: "Turns, masks", of: (_t, _i, _step, turn) => turn, kinds: true },
};
const SHADES = 8;

const shown = new Map([["\n", "⏎\n"], ["\t", "⇥\t"]]);
// Control characters and marks of direction would change what stands around them: they are shown by their numbers.
export const clean = (text) =>
  text.replace(
    // deno-lint-ignore no-control-regex
    /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g,
    (c) => shown.get(c) ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );

function largest(rows, coloring, step) { // over trained tokens alone: what is masked has numbers that mean nothing
  let most = 0;
  for (const one of rows) {
    const t = one.tokens;
    t?.mask.forEach((trained, i) => {
      if (trained) {
        const v = coloring.of(t, i, step, 0);
        if (v != null) most = Math.max(most, Math.abs(v));
      }
    });
  }
  return most;
}

// One scale for all groups that stand beside each other.
export const scaleOf = (name, groups) =>
  Math.max(...groups.map((found) => largest(found.trajectories, COLORINGS[name], found.step))) || 1;

function shade(value, most, coloring, trained) {
  if (!trained) return "masked";
  if (value == null) return "unknown";
  if (coloring.kinds) return `k${Math.min(5, value)}`;
  const level = Math.min(SHADES, Math.round((Math.abs(value) / most) * SHADES));
  return `${coloring.signed && value < 0 ? "n" : "p"}${level}`;
}

function turnOf(one) { // the turn of each token, by its place in the whole conversation
  const starts = one.facts.turns.map((turn) => turn.start);
  return (place) => {
    let found = 0;
    while (found + 1 < starts.length && starts[found + 1] <= place) found++;
    return found;
  };
}

// The place up to which another trajectory of the group shows the same tokens: they were sampled once, before a fork
// from which this one is not the first way. The server tells forks as [place, way]; older runs have none.
export function shownElsewhere(one, found) {
  const forks = one.facts.forks ?? [];
  const at = forks.findLastIndex(([place, way]) => place > 0 && way > 0);
  if (at < 0) return { end: 0, other: null };
  const begins = (ways) => forks.slice(0, at).every(([place, way], i) => ways[i]?.[0] === place && ways[i][1] === way);
  const other = found.trajectories.find((each) => {
    const ways = each.facts.forks ?? [];
    return each !== one && begins(ways) && ways[at]?.[0] === forks[at][0] && ways[at][1] === 0;
  });
  return other ? { end: forks[at][0], other } : { end: 0, other: null };
}

// 2.1: the first way of the second beginning.
export const wayOf = (one) => (one.facts.forks ?? []).map(([, way]) => way + 1).join(".");

export function legend(name, most) {
  const coloring = COLORINGS[name], format = (v) => number((coloring.shown ?? ((x) => x))(v));
  const sample = (kind, text) =>
    el("span", { class: "sample" }, el("span", { class: `t ${kind}` }, " a token "), ` ${text}  `);
  if (name === "turn") {
    return el(
      "p",
      { class: "legend" },
      sample("k0", "first turn"),
      sample("k1", "second"),
      sample("k2", "third, and so on"),
      sample("masked", "given, not trained"),
    );
  }
  if (coloring.kinds) {
    return el(
      "p",
      { class: "legend" },
      Array.from(
        { length: Math.min(5, Math.round(most)) + 1 },
        (_, lag) => sample(`k${lag}`, `${lag}${lag === 5 ? " or more" : ""} versions old`),
      ),
      sample("masked", "given, not trained"),
    );
  }
  const ends = coloring.signed
    ? [["n8", -most], ["n4", -most / 2], ["p0", 0], ["p4", most / 2], ["p8", most]]
    : [["p0", 0], ["p4", most / 2], ["p8", most]];
  return el(
    "p",
    { class: "legend" },
    ends.map(([kind, value]) => sample(kind, `${format(value)} ${coloring.unit}`)),
    sample("masked", "given, not trained"),
  );
}

export function strip(one, found, name, most) {
  const t = one.tokens, coloring = COLORINGS[name], turn = turnOf(one), first = t.begin;
  const box = el("div", {
      class: "tokens",
      dir: "ltr",
      tabindex: "0",
      role: "group",
      "aria-label": `${number(t.pieces.length)} tokens: the arrow keys go from one to the next`,
    }),
    told = el("p", { class: "told", "aria-live": "off" }, "\u00a0");
  const runs = [], several = one.facts.turns.length > 1;
  /** @type {{ kind: string, text: string, from: number, element: HTMLElement } | null} */
  let run = null;
  const flush = () => {
    if (run) {
      run.element.textContent = clean(run.text);
      box.append(run.element);
      runs.push(run.element);
    }
  };
  const { end, other } = shownElsewhere(one, found), skipped = Math.min(t.pieces.length, Math.max(0, end - first));
  if (skipped) {
    box.append(el("span", { class: "soft" }, `… ${number(skipped)} tokens as in way ${wayOf(other)} … `));
  }
  for (let i = skipped; i < t.pieces.length; i++) {
    const kind = shade(coloring.of(t, i, found.step, turn(first + i)), most, coloring, t.mask[i] === 1);
    if (run?.kind !== kind) {
      flush();
      // What was said to the policy, such as a terminal's text, stands on lines of its own.
      if (run && several && (run.kind === "masked") !== (kind === "masked")) box.append(el("br"));
      run = { kind, text: "", from: i, element: el("span", { class: `t ${kind}` }) };
      run.element.dataset.from = String(i);
    }
    run.text += t.pieces[i];
    run.element.dataset.to = String(i + 1);
  }
  flush();
  const tell = (i) => {
    told.textContent = i == null
      ? "\u00a0"
      : `token ${first + i} (id ${t.ids[i]}) ${JSON.stringify(clean(t.pieces[i])).slice(0, 60)}: ${
        t.mask[i]
          ? `version ${t.versions[i]}, logprob ${number(t.behavior_logprobs[i])} sampling and ${
            number(t.learner_logprobs[i])
          } learning, ratio ${number(gap(t, i) == null ? null : Math.exp(gap(t, i)))}, entropy ${
            number(t.entropies[i])
          }, advantage ${number(t.advantages[i])}`
          : "given, not sampled"
      }`;
  };
  box.addEventListener("pointerover", (event) => { // a run of one colour falls into its tokens under the pointer
    const at = event.target;
    if (at.dataset.at != null) return tell(Number(at.dataset.at));
    if (at.dataset.from == null || at.childElementCount) return undefined;
    const [from, to] = [Number(at.dataset.from), Number(at.dataset.to)];
    if (to - from > 2000) return tell(from);
    at.replaceChildren(...Array.from({ length: to - from }, (_, k) => {
      const each = el("span", {}, clean(t.pieces[from + k]));
      each.dataset.at = from + k;
      return each;
    }));
    return undefined;
  });
  box.addEventListener("pointerleave", () => tell(null));
  byKeyboard(box, runs, t.pieces, (i) => {
    told.setAttribute("aria-live", i == null ? "off" : "polite");
    tell(i);
  });
  return el("div", {}, curve(t, coloring, found.step), box, told);
}

function byKeyboard(box, runs, pieces, tell) { // a cursor that goes from token to token while the tokens have the focus
  const least = Number(runs[0]?.dataset.from ?? 0);
  let at = least - 1, inside = null;
  const text = (from, to) => clean(pieces.slice(from, to).join(""));
  const leave = () => {
    if (inside) inside.textContent = text(Number(inside.dataset.from), Number(inside.dataset.to));
    inside = null;
  };
  box.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: least, End: pieces.length - 1 }[event.key];
    if (to == null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    leave();
    at = Math.max(least, Math.min(pieces.length - 1, to));
    inside = runs.find((each) => Number(each.dataset.to) > at);
    if (!inside) return;
    const cursor = el("span", { class: "cursor" }, text(at, at + 1));
    inside.replaceChildren(text(Number(inside.dataset.from), at), cursor, text(at + 1, Number(inside.dataset.to)));
    cursor.scrollIntoView({ block: "nearest" });
    tell(at);
  });
  box.addEventListener("blur", () => {
    leave();
    tell(null);
  });
}

function curve(t, coloring, step) { // the same numbers against the position
  if (coloring.kinds || t.pieces.length < 24) return null;
  const values = t.mask.map((trained, i) => (trained ? coloring.of(t, i, step, 0) : null)),
    most = values.reduce((largest, v) => Math.max(largest, Math.abs(v ?? 0)), 0) || 1,
    low = coloring.signed ? -most : 0;
  const canvas = el("canvas", { class: "spark", role: "img", "aria-label": `${coloring.title} over the tokens` });
  requestAnimationFrame(() => {
    const width = canvas.clientWidth, height = 36, ratio = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.strokeStyle = css("--blue");
    context.beginPath();
    let down = false;
    values.forEach((v, i) => {
      if (v == null) {
        down = false;
        return;
      }
      const x = (i / values.length) * width, y = height - 2 - ((v - low) / (most - low)) * (height - 4);
      if (down) context.lineTo(x, y);
      else context.moveTo(x, y);
      down = true;
    });
    context.stroke();
  });
  return canvas;
}
