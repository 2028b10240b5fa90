// Metrics over steps, as the server packs them: dashboard/series.py describes the layout.
import { useEffect, useRef, useState } from "preact/hooks";
import { address, refusal, Refused } from "./api";
import type { Plot } from "./types";

export interface Answer {
  plots: Record<string, Plot>;
  /** Runs whose lines are not there yet: their records are being compacted. */
  pending: string[];
}

interface Packed {
  pending: string[];
  plots: Record<string, { runs: string[]; steps: number; means: boolean; value: 4 | 8 }>;
}

export interface Question {
  run: string[];
  key: string[];
  buckets: number;
  first?: number;
  last?: number;
}

const DOUBLE = 8;

export async function askPlots(question: Question): Promise<Answer> {
  let answer: Response;
  try {
    answer = await fetch(address("/api/series", { ...question }), { credentials: "same-origin" });
  } catch {
    throw new Refused("the server does not answer", 0, "start it again with headway ui");
  }
  if (!answer.ok) throw await refusal(answer);
  return unpack(await answer.arrayBuffer());
}

function unpack(data: ArrayBuffer): Answer {
  const size = new DataView(data).getUint32(0, true);
  const document = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, size))) as Packed;
  let at = 4 + size;
  const plots: Record<string, Plot> = {};
  for (const [key, { runs, steps, means, value }] of Object.entries(document.plots)) {
    const column = (length: number, bytes: number): (number | null)[] => {
      const numbers = bytes === DOUBLE ? new Float64Array(data, at, length) : new Float32Array(data, at, length);
      at += length * bytes;
      return Array.from(numbers as ArrayLike<number>, (each) => (each === each ? each : null));
    };
    const x = column(steps, DOUBLE) as number[];
    const lines = Object.fromEntries(runs.map((run) => [run, column(steps, value)]));
    plots[key] = { steps: x, lines, means: means ? Object.fromEntries(runs.map((run) => [run, column(steps / 2, value)])) : null };
    at += (DOUBLE - (at % DOUBLE)) % DOUBLE;
  }
  return { plots, pending: document.pending };
}

export interface Plots extends Answer {
  error: Refused | null;
}

/**
 * Metrics of some runs, all in one question, and never two at once: what runs record meanwhile is asked for afterwards.
 * What is shown stays until the next answer is there. Runs whose records are still being compacted follow as they are ready.
 */
export function usePlots(runs: string[], keys: string[], range: [number, number] | null, round: number, buckets: number): Plots {
  const [state, setState] = useState<Plots>({ plots: {}, pending: [], error: null });
  const question: Question = { run: runs, key: keys, buckets, first: range?.[0], last: range?.[1] };
  const wanted = useRef(question);
  wanted.current = question;
  const busy = useRef(false);
  const later = useRef(false);
  const open = useRef(true);
  const load = async () => {
    later.current = true;
    if (busy.current) return;
    busy.current = true;
    while (later.current && open.current) {
      later.current = false;
      const now = wanted.current;
      if (!now.run.length || !now.key.length) break;
      try {
        const answer = await askPlots(now);
        if (now.run.join("\n") === wanted.current.run.join("\n")) setState({ ...answer, error: null });
        if (answer.pending.length) later.current = true;
      } catch (error) {
        setState((before) => ({ ...before, error: error as Refused }));
      }
    }
    busy.current = false;
  };
  useEffect(() => void load(), [runs.join("\n"), keys.join("\n"), range?.[0], range?.[1], round, buckets]);
  useEffect(() => () => void (open.current = false), []);
  return state;
}
