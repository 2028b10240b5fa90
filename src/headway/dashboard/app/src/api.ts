// Asking the server, and hearing from it.
import { useEffect, useRef, useState } from "preact/hooks";

export class Refused extends Error {
  constructor(message: string, readonly status: number, readonly hint: string | null) {
    super(message);
  }
}

export type Params = Record<string, string | number | string[] | null | undefined>;

export function address(path: string, params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (Array.isArray(value)) value.forEach((part) => query.append(key, part));
    else if (value !== null && value !== undefined && value !== "") query.set(key, String(value));
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export async function ask<T>(path: string, params: Params = {}): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(address(path, params), { credentials: "same-origin" });
  } catch {
    throw new Refused("the server does not answer", 0, "start it again with headway ui");
  }
  if (!answer.ok) throw await refusal(answer);
  return (await answer.json()) as T;
}

/** Why an answer is not what was asked for. */
export async function refusal(answer: Response): Promise<Refused> {
  const body = await answer.json().catch(() => ({}));
  return new Refused(body.error ?? `status ${answer.status}`, answer.status, body.hint ?? null);
}

export interface Asked<T> {
  data: T | null;
  error: Refused | null;
  again: () => void;
}

/** What a path answers. While it is asked again, what is known stays: nothing flickers. A null path asks nothing. */
export function useAsk<T>(path: string | null, params: Params = {}): Asked<T> {
  const wanted = path === null ? null : address(path, params);
  const [state, setState] = useState<{ of: string | null; data: T | null; error: Refused | null }>({
    of: null,
    data: null,
    error: null,
  });
  const [round, setRound] = useState(0);
  const busy = useRef<{ of: string; again: boolean } | null>(null);
  useEffect(() => {
    if (wanted === null) return;
    if (busy.current?.of === wanted) {
      busy.current.again = true; // one question at a time, and the newest answer last
      return;
    }
    const mine = { of: wanted, again: false };
    busy.current = mine;
    const run = async () => {
      do {
        mine.again = false;
        try {
          const data = await ask<T>(wanted);
          if (busy.current === mine) setState({ of: wanted, data, error: null });
        } catch (error) {
          if (busy.current === mine)
            setState((before) => ({ of: wanted, data: before.of === wanted ? before.data : null, error: error as Refused }));
        }
      } while (mine.again && busy.current === mine);
      if (busy.current === mine) busy.current = null;
    };
    void run();
  }, [wanted, round]);
  return { data: state.data, error: state.error, again: () => setRound((n) => n + 1) };
}

/** As useAsk, and asked again every so often while the page is visible. */
export function usePoll<T>(path: string, params: Params, everyMs: number): Asked<T> {
  const asked = useAsk<T>(path, params);
  const again = useRef(asked.again);
  again.current = asked.again;
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && again.current(), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return asked;
}

/** Calls back when runs change (one run, if named); silent while the page is hidden. */
export function useLive(run: string | null, changed: (runs: string[]) => void): boolean {
  const callback = useRef(changed);
  callback.current = changed;
  const [connected, setConnected] = useState(true);
  useEffect(() => {
    let source: EventSource | null = null;
    const open = () => {
      source = new EventSource(address("/api/live", { run }));
      source.addEventListener("changed", (event) => callback.current(JSON.parse((event as MessageEvent).data).runs));
      source.addEventListener("hello", () => setConnected(true));
      source.onerror = () => setConnected(false);
    };
    const visibility = () => {
      source?.close();
      source = null;
      if (!document.hidden) {
        open();
        callback.current([]);
      }
    };
    open();
    document.addEventListener("visibilitychange", visibility);
    return () => {
      document.removeEventListener("visibilitychange", visibility);
      source?.close();
    };
  }, [run]);
  return connected;
}
