import { el } from "./dom.js";

export class Viewer {
  constructor(target) { this.target = target; }
  show() { this.target.replaceChildren(el("p", {}, "soon")); }
}
