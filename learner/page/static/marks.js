// Marks on the curves where something happened: which are shown, where they stand, and what the pointer tells of them.
import { $, css, el, number } from "./dom.js";

const NEAR = 12; // marks within so many pixels are one line
const REACH = 6; // so near the pointer is over a line
const MOST_TOLD = 6;

export class Marks {
  /** @param {MarkKind[]} kinds in their order: of marks near each other the first is drawn @param {() => void} changed */
  constructor(kinds, changed) {
    this.kinds = new Map(kinds.map((kind, order) => [kind.kind, { ...kind, order }]));
    this.changed = changed;
    /** @type {Set<string>} */
    this.off = new Set();
    /** @type {CurveMark[]} */
    this.all = [];
    this.grouped = new Map();
    /** @type {Map<string, HTMLElement>} */
    this.buttons = new Map();
    for (const { kind, title, symbol } of kinds) {
      const button = el("button", { type: "button", onclick: () => this.press(kind) }, `${symbol} ${title}`);
      this.buttons.set(kind, $("marks").appendChild(button));
    }
  }

  // For the address.
  get hidden() {
    return [...this.off].join(",");
  }

  /** @param {string} kinds */
  hide(kinds) {
    this.off = new Set(kinds.split(",").filter((kind) => this.kinds.has(kind)));
  }

  press(kind) {
    if (!this.off.delete(kind)) this.off.add(kind);
    this.changed();
  }

  isRegular(kind) {
    return this.kinds.get(kind)?.regular ?? false;
  }

  /** @param {CurveMark[]} marks @param {(mark: CurveMark) => number} place @param {[number, number]} ends */
  take(marks, place, ends) {
    this.grouped.clear();
    const there = new Set(marks.map(({ kind }) => kind));
    for (const [kind, button] of this.buttons) {
      button.hidden = !there.has(kind);
      button.setAttribute("aria-pressed", String(!this.off.has(kind)));
    }
    $("marks").hidden = !there.size;
    this.all = marks.filter(({ kind }) => this.kinds.has(kind) && !this.off.has(kind));
    this.place = place;
    this.ends = ends;
  }

  // What is drawn over so many pixels, from left to right. Those of curves are kept for all figures of that width.
  /** @param {number} width @param {(mark: CurveMark) => number} [place] @param {[number, number]} [ends] @returns {MarkGroup[]} */
  groups(width, place, ends) {
    if (place) return this.made(width, place, ends);
    if (!this.grouped.has(width)) this.grouped.set(width, this.made(width, this.place, this.ends));
    return this.grouped.get(width);
  }

  made(width, place, [from, to]) {
    const placed = this.all.map((mark) => ({ mark, x: ((place(mark) - from) / (to - from)) * width }))
      .filter(({ x }) => x >= -0.5 && x <= width + 0.5).sort((a, b) => a.x - b.x);
    const found = [];
    for (const each of placed) {
      const last = found.at(-1);
      if (last && each.x - last[0].x <= NEAR) last.push(each);
      else found.push([each]);
    }
    return found.map((each) => this.group(each));
  }

  group(placed) {
    const order = ({ mark }) => this.kinds.get(mark.kind).order;
    const sorted = placed.toSorted((a, b) => order(a) - order(b)), { mark, x } = sorted[0];
    const { color, regular } = this.kinds.get(mark.kind);
    return { x, color, regular, symbol: mark.symbol, marks: sorted.map((each) => each.mark) };
  }
}

// Thin lines with their symbols on top; `box` is that of the curves, in pixels of the canvas, `ratio` of them are one.
/** @param {CanvasRenderingContext2D} context @param {MarkGroup[]} groups */
export function drawMarks(context, groups, { left, top, height }, ratio) {
  context.save();
  context.font = `bold ${12 * ratio}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.setLineDash([3 * ratio, 3 * ratio]);
  for (const { x, color, regular, symbol } of groups) {
    const at = left + Math.round(x * ratio) + 0.5 * ratio;
    const line = (stroke, width, alpha) => {
      context.strokeStyle = stroke;
      context.lineWidth = width * ratio;
      context.globalAlpha = alpha;
      context.beginPath();
      context.moveTo(at, top + 13 * ratio);
      context.lineTo(at, top + height);
      context.stroke();
    };
    line(css("--paper"), 3, 0.6); // between a line and what it crosses, which may be a filled curve
    context.strokeText(symbol, at, top + 11 * ratio);
    line(css(`--${color}`), 1, regular ? 0.4 : 0.9);
    context.globalAlpha = 1;
    context.fillStyle = css(`--${color}`);
    context.fillText(symbol, at, top + 11 * ratio);
  }
  context.restore();
}

// Tells of the line that the pointer is near. `host` holds what is told; curves begin at `left` of the surface.
/** @param {HTMLElement} surface @param {HTMLElement} host @param {number} left @param {() => MarkGroup[]} groups */
export function tellMarks(surface, host, left, groups) {
  const told = host.appendChild(el("div", { class: "told-mark", role: "tooltip", hidden: true }));
  const hide = () => told.hidden = true;
  surface.addEventListener("mouseleave", hide);
  surface.addEventListener("mousemove", (event) => {
    const at = event.clientX - surface.getBoundingClientRect().left - left,
      away = (group) => Math.abs(group.x - at),
      near = groups().reduce((best, one) => (!best || away(one) < away(best) ? one : best), null);
    if (!near || away(near) > REACH) return hide();
    told.replaceChildren(...lines(near.marks).map((text) => el("div", {}, text)));
    told.hidden = false;
    const x = left + near.x + 10, room = surface.clientWidth - told.offsetWidth;
    told.style.left = `${(surface === host ? 0 : surface.offsetLeft) + Math.max(0, Math.min(x, room))}px`;
    told.style.top = `${surface === host ? 4 : surface.offsetTop + 4}px`;
  });
}

/** @param {CurveMark[]} marks */
function lines(marks) {
  const said = marks.slice(0, MOST_TOLD).map(({ symbol, step, text }) => `${symbol} step ${number(step)}: ${text}`);
  return marks.length > MOST_TOLD ? [...said, `and ${number(marks.length - MOST_TOLD)} more`] : said;
}
