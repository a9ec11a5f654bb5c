// What each process takes of its machine, and the end of its log: asked for while it is unfolded.
import { $, ask, el, number, seconds, share, table } from "./dom.js";

const EVERY_MS = 4000;
const HEAD = ["process", "machine", "up", "cores at work", "memory"];

export class Machines {
  constructor(run) {
    this.run = run; // tells which run is shown
    this.open = new Set(); // names whose log is unfolded
    $("machines").addEventListener("toggle", () => this.begin());
  }

  begin() {
    clearTimeout(this.timer);
    if ($("machines").open && !document.hidden) this.renew();
  }

  async renew() {
    const found = await ask("machines", { run: this.run() }).catch(() => null);
    if (found) this.show(found);
    this.timer = setTimeout(() => this.begin(), EVERY_MS);
  }

  /** @param {MachineTold[]} found */
  show(found) {
    const some = found.some((one) => one.usage?.gpus?.length); // nothing is said of GPUs where nobody has one
    table(
      $("machines").querySelector("table"),
      some ? [...HEAD, "GPUs"] : HEAD,
      found.map((one) => [
        ...(one.pid == null ? [one.name, `${one.condition}: ${one.complaint}`, "", "", ""] : [
          one.name,
          `${one.host}, process ${one.pid}`,
          seconds(one.uptime_s),
          one.usage?.cores.toFixed(2) ?? "–",
          memory(one.usage?.memory_bytes),
        ]),
        ...(some ? [el("div", {}, (one.usage?.gpus ?? []).map((each) => el("div", {}, gpu(each))))] : []),
      ]),
    );
    $("logs").replaceChildren(...found.filter((one) => one.log?.length).map((one) => this.log(one)));
    if (!found.length) $("logs").replaceChildren(el("p", { class: "soft" }, "Only a run that goes on has processes."));
  }

  /** @param {MachineTold} one */
  log({ name, log }) {
    const lines = el("pre", { class: "log", tabindex: "0" }, log.join("\n"));
    const made = el("details", { open: this.open.has(name) }, el("summary", {}, `Log of ${name}`), lines);
    made.addEventListener("toggle", () => made.open ? this.open.add(name) : this.open.delete(name));
    return made;
  }
}

/** @param {GpuTold} one */
const gpu = ({ index, busy_share, memory_bytes, total_bytes }) =>
  `${index}: ${share(busy_share)} busy, ${memory(memory_bytes)} of ${memory(total_bytes)}`;

export const memory = (bytes) =>
  bytes == null
    ? "–"
    : bytes < 1 << 30
    ? `${number(Math.round(bytes / (1 << 20)))} MiB`
    : `${number(bytes / (1 << 30))} GiB`;
