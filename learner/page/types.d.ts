// What the learner sends to its page, and what is used of uPlot: for the type checker alone, which the browser never sees.

/** Null where a step has no such number. */
type Column = (number | null)[];

/** Steps as columns, by the names of metrics.jsonl; `lags` counts the trajectories of each step by their lag. */
interface Columns {
  step: number[];
  lags: Record<string, number>[];
  // deno-lint-ignore no-explicit-any -- which numbers there are is said in learner/reports/history.py
  [name: string]: any[];
}

interface RunEvent {
  kind: string;
  step: number;
  unix_s: number | null;
  accuracy?: number | null;
  state?: string;
  sentence?: string;
  remedy?: string;
  accuracy_low?: number | null;
  accuracy_high?: number | null;
}

/** A kind of events that are marked on the curves. */
interface MarkKind {
  kind: string;
  title: string;
  symbol: string;
  color: string;
  /** It stands at its version, on every axis. */
  regular: boolean;
}

/** Something that happened after a step. */
interface CurveMark {
  kind: string;
  step: number;
  symbol: string;
  text: string;
  unix_s: number | null;
}

/** Marks that are one line of a figure, so many pixels from the left end of its axis. */
interface MarkGroup {
  x: number;
  color: string;
  regular: boolean;
  symbol: string;
  marks: CurveMark[];
}

interface CurveSpec {
  name: string;
  title: string;
  color: string;
  largest: boolean;
  /** Its values are numbers by name, each of which is a line. */
  by_name: boolean;
  /** Also where there is one name only. */
  alone: boolean;
}

/** A curve with its values in a run. */
interface MeasuredCurve extends CurveSpec {
  values: Column;
}

interface FigureSpec {
  id: string;
  heading: string;
  log: boolean;
  zero: boolean;
  stacked: boolean;
  whole: boolean;
  held_out: boolean;
  /** False for one that is shown where somebody asks for it. */
  drawn: boolean;
  curves: CurveSpec[];
}

/** A run that is shown: the one of the page, or one beside it. */
interface ShownRun {
  name: string;
  columns: Columns;
  events: RunEvent[];
  marks: CurveMark[];
}

interface OtherRun {
  run: string;
  name: string;
}

interface PeerStatus {
  name: string;
  url: string;
  state: string;
  last_heard_s: number | null;
  version: string | null;
  idle_share?: number;
  tokens_per_s?: number;
  running?: number;
}

/** How the run is, in a sentence that holds cause and remedy. */
interface Verdict {
  state: string;
  sentence: string;
  remedy: string;
}

/** A GPU that a process holds; not every card tells how busy it is. */
interface GpuTold {
  index: number;
  busy_share: number | null;
  memory_bytes: number;
  total_bytes: number;
}

interface MachineTold {
  name: string;
  kind: string;
  condition: string;
  complaint?: string;
  pid?: number;
  host?: string;
  uptime_s?: number;
  usage?: { cores: number; memory_bytes: number; gpus: GpuTold[] } | null;
  log?: string[];
}

/** What the learner says of itself and the others; of a run that is read from its files, only what these tell. */
interface ProcessesTold {
  live: boolean;
  life?: "goes on" | "died" | "ended";
  verdict?: Verdict | null;
  learner?: {
    standing_s: number | null;
    version: number;
    total: number | null;
    queues: { name: string; depth: number }[];
    problems: string[];
    notes?: string[];
    waits: { whom: string; since_s: number }[];
    failures: { age_s: number; text: string }[];
  };
  generators?: PeerStatus[];
  env_services?: PeerStatus[];
  reward_services?: { name: string; latency_s: number; step: number }[];
}

/** A tenant of a server of training loops, with what it may have at once. */
interface TenantTold {
  name: string;
  runs: number;
  queued: number;
  queue_limit: number;
  queued_bytes: number;
  bytes_limit: number;
  completions: number;
  completion_limit: number;
  refused: number;
  waits_s: number;
  rows_per_s: number;
}

interface TenantRunTold {
  name: string;
  tenant: string;
  title: string;
  rank: number;
  steps: number;
  queued: number;
  completions: number;
  waits_for: string;
  since_s: number;
  place: string;
  rows_per_s: number;
  tokens_per_s: number;
  loss: number | null;
}

/** What a server of training loops says of itself; `viewer` is the tenant that reads, null for whoever sees all. */
interface TenantsTold {
  name: string;
  viewer: string | null;
  verdict: Verdict;
  base_model: string;
  tenants: TenantTold[];
  runs: TenantRunTold[];
  with_curves: string[];
  tenant_count: number;
  run_count: number;
  resident: number;
  clients: number;
  queued: number;
  completions: number;
  tokens_per_s: number;
  generators: number;
  generator_silent_s: number | null;
  at_work:
    | { tenant: string; run: string; kind: string; rows: number; tokens: number; sharing: number; since_s: number }
    | null;
  peers?: PeerStatus[];
}

/** A line of a figure: its values, and what uPlot is told of it. */
interface DrawnLine {
  values: Column;
  told: { label: string; [option: string]: unknown };
}

/** Lines over the same places of the x axis. */
interface DrawnTable {
  xs: number[];
  lines: DrawnLine[];
  intervals?: Interval[];
}

/** An interval of confidence, at a place of the x axis. */
interface Interval {
  x: number;
  low: number;
  high: number;
  color: string;
}

/** The elements of index.html: those of a form have a value, some of them options, links an address, what can be unfolded is open or not. */
interface PageElement extends HTMLElement {
  options: HTMLOptionsCollection;
  open: boolean;
  value: string;
  href: string;
}

declare class uPlot {
  static join(tables: unknown[]): unknown;
  constructor(options: unknown, data: unknown, target: Element);
  root: HTMLElement;
  data: number[][];
  ctx: CanvasRenderingContext2D;
  over: HTMLElement;
  cursor: { left: number };
  posToVal(place: number, scale: string): number;
  bbox: { left: number; top: number; width: number; height: number };
  valToPos(value: number, scale: string, canvas: boolean): number;
  setData(data: unknown): void;
  destroy(): void;
}
