// What the server sends; see the modules of headway/dashboard that are named here.

export interface RunRow {
  name: string;
  state: string;
  step: number;
  total_steps?: number | null;
  loss?: number | null;
  reward?: number | null;
  grad_norm?: number | null;
  lr?: number | null;
  attempts?: number;
  started?: number | null;
  seconds?: number;
  workers?: number | null;
  device?: string;
  reason?: string;
  recipe?: string | null;
  objective?: string | null;
  active?: number | null;
  step_s?: number | null;
  tokens_per_s?: number | null;
  mfu?: number | null;
  eta_s?: number | null;
  tags?: string[];
  note?: string;
  problem?: string;
}

export interface Parent {
  run: string;
  step: number | null;
  here: boolean;
}

// run_page.overview
export interface Overview extends RunRow {
  metrics: string[];
  parent: Parent | null;
  environment: Record<string, unknown>;
  /** Of the cluster's service, that trains this run. */
  job: string | null;
  policy: boolean;
  evaluations: Evaluation[];
  commands: Record<string, string>;
}

export interface Evaluation {
  task: string;
  variant: string;
  step: number | null;
  questions: number;
  metrics: { name: string; value: number; low: number | null; high: number | null; share: boolean }[];
}

// Unpacked in plots.ts.
export interface Plot {
  steps: number[];
  lines: Record<string, (number | null)[]>;
  means: Record<string, (number | null)[]> | null;
}

export interface Incident {
  wall: number;
  attempt: number;
  text: string;
  step: number | null;
}

export interface Account {
  name: string;
  seconds: number;
  share: number;
  plan: number | null;
}

export interface PlanFacts {
  cluster: string;
  assumed: boolean;
  mesh: Record<string, number>;
  microbatch: number;
  recompute: string;
  step_s: number;
  measured_s: number | null;
  off: number | null;
  mfu: number;
  measured_mfu: number | null;
  tokens_per_s: number;
  accounts_s: Record<string, number>;
  memory_bytes: number;
  capacity_bytes: number;
}

// headway/track/insights.py
export interface Insight {
  kind: string;
  text: string;
  step: number | null;
  evidence: Record<string, unknown>;
}

// documents.step_documents
export interface StepDocuments {
  step: number;
  problem?: string;
  hint?: string | null;
  done: boolean;
  last_step: number;
  count: number;
  first: number;
  command: string;
  parts: { row: number; dataset: string; document: number; first: number; end: number; tokens: number; text: string; cut: boolean; source: string | null; bits: number | null; stands_out: boolean }[];
  /** Mean and largest surprise of the documents of steps around it. */
  around: [number, number] | null;
}

// run_page.ledger_document
export interface Ledger {
  total_s: number;
  accounts: Account[];
  useful_s: number | null;
  mfu: number | null;
  mfu_full_attention: number | null;
  overhead: { account: string; seconds: number; share: number; advice: string } | null;
  plan: PlanFacts | null;
  attempts: {
    number: number;
    started: number;
    seconds: number;
    workers: number;
    device: string;
    resumed_from: number | null;
    outcome: string | null;
    reason: string;
  }[];
  incidents: Incident[];
  clock: { steps: number[]; walls: number[] };
  insights: Insight[];
  warnings: string[];
}

export interface FileEntry {
  name: string;
  modified: number;
  bytes: number;
}

export interface SampleFile {
  path: string;
  kind: "image" | "audio" | "video" | "text";
  modified: number;
  bytes: number;
}

export interface RecipeRow {
  key: string;
  value: unknown;
  before?: unknown;
  changed?: boolean;
}

export interface Answer {
  answer: number;
  text: string;
  reward: number | null;
  rewards: Record<string, number> | null;
  error: string | null;
  advantage: number | null;
  in_loss: boolean;
  finish: string;
  tokens: number;
}

export interface Group {
  group: number;
  sample: number;
  step: number | null;
  prompt_text: string;
  answers: Answer[];
}

export interface Batch {
  step: number;
  problem?: string;
  version: number;
  groups: Group[];
  first: number;
  count: number;
  answers: number;
  failed: number;
  rewards: number[];
  metrics: Record<string, number>;
}

export interface Dataset {
  id: string;
  path: string;
  runs: string[];
  problem?: string;
  version?: string;
  kind?: string;
  documents?: number;
  tokens?: number;
  trained_tokens?: number | null;
  vocab_size?: number;
  shards?: number;
  bytes?: number;
  /** Images or video: `documents` counts clips. */
  media?: boolean;
  seconds?: number | null;
}

// sheets.clip_page
export interface Clip {
  clip: number;
  name: string;
  captions: string[];
  label: number | null;
  width: number;
  height: number;
  frames: number;
  seconds: number;
}

// lineage.name_list
export interface ModelName {
  name: string;
  run: string;
  step: number;
  digest: string;
  at: number;
  notes: { at: number; text: string }[];
  before: { run: string; step: number; at: number }[];
  here: boolean;
}

// lineage.lineage_document
export interface LineageNode {
  kind: string;
  name: string;
  id: string | null;
  digest: string | null;
  gone: boolean;
  scores: Record<string, number>;
}

export interface LineageBranch extends LineageNode {
  how: string;
  repeated: boolean;
  branches: LineageBranch[];
}

export interface DatasetSample {
  document: number;
  tokens: number;
  cut: boolean;
  pieces: { text: string; role: string | null; trained: boolean; tokens: number }[];
  fields?: Record<string, unknown>;
}

export interface Model {
  run: string;
  parent: Parent | null;
  objective: string | null;
  adapters: boolean;
  checkpoints: {
    step: number;
    digest: string | null;
    bytes: number | null;
    saved: number;
    scores: { task: string; name: string; value: number; low: number | null; high: number | null; share: boolean }[];
  }[];
  commands: Record<string, string>;
}

// -- the cluster: cluster_source.py, and headway/cluster/service/views.py

export interface MaybeProblem {
  problem?: string;
  hint?: string | null;
}

export interface ClusterNode {
  name: string;
  chip: string;
  gpus: string[];
  cpus: number;
  memory_bytes: number;
  state: string;
  gpus_free: number;
  cpus_free: number;
  jobs: string[];
  domains?: Record<string, string>;
}

export interface ClusterJob {
  id: string;
  name: string;
  tenant: string;
  state: string;
  reason: string;
  held: boolean;
  starts: number;
  exit_status: number | null;
  submitted: number;
  started: number | null;
  ended: number | null;
  gpus: number;
  sizes?: number[];
  machines: number;
  cpus: number;
  priority: number;
  preemptible: boolean;
  placement: { node: string; gpus: string[] }[];
}

// headway/cluster/service/tenant_routes.py
export interface Tenant {
  name: string;
  parent: string | null;
  guarantee: number;
  borrow: number | null;
  budget_gpu_h: number | null;
  gpus: number;
  wanted_gpus: number;
  spent_gpu_h: number;
  month: string;
}

// headway/cluster/service/event_sentences.py
export interface ClusterEvent {
  seq: number;
  at_s: number;
  kind: string;
  sentence: string;
  job: string | null;
  node: string | null;
  name: string | null;
  tenant: string | null;
}

export interface Cluster extends MaybeProblem {
  nodes: ClusterNode[];
  jobs: ClusterJob[];
  over: ClusterJob[];
  tenants: Tenant[];
  newest: ClusterEvent[];
}

export interface ClusterSpan {
  state: string;
  begin_s: number;
  end_s: number | null;
  gpus: number;
  nodes: string[];
}

export interface Lane {
  job: string;
  name: string | null;
  tenant: string | null;
  gpus: number;
  spans: ClusterSpan[];
}

export interface Timeline extends MaybeProblem {
  now_s: number;
  jobs: Lane[];
  hidden: number;
  events: ClusterEvent[];
  tenants: string[];
  /** Why there are no spans: who may not read the record sees events only. */
  refusal: string;
}

export interface JobDocument extends MaybeProblem {
  job: ClusterJob;
  tasks: string[];
  spans: ClusterSpan[];
  events: ClusterEvent[];
  now_s: number;
  run: string | null;
}

export interface WhyAnswer extends ClusterJob, MaybeProblem {
  why: {
    state: string;
    sentence: string;
    holders: { tenant: string; gpus: number; jobs: number | null; guarantee: number | null }[];
    instead: { sentence: string }[];
    start: { p50_s: number | null; p90_s: number | null } | null;
  } | null;
}
