// Which documents a step trained on: what a loss spike leads to.
import { useEffect, useState } from "preact/hooks";
import { useAsk } from "./api";
import { count, fixed } from "./format";
import { Command, Empty, Problem } from "./parts";
import { setQuery, usePlace } from "./router";
import type { Overview, StepDocuments } from "./types";

export function Documents({ run }: { run: Overview }) {
  const { query } = usePlace();
  const step = Math.max(1, Math.floor(Number(query.get("step")) || run.step || 1));
  const [first, setFirst] = useState(0);
  useEffect(() => setFirst(0), [step]);
  const { data, error } = useAsk<StepDocuments>("/api/documents", { run: run.name, step, first });
  const pick = (next: number) => setQuery({ step: String(next) });
  return (
    <div class="step-documents">
      <div class="toolbar">
        <button disabled={step <= 1} onClick={() => pick(step - 1)} aria-label="step before">←</button>
        <label class="slider">step <input class="number" type="number" min="1" max={data?.last_step} value={step} onChange={(event) => pick(Number(event.currentTarget.value))} /></label>
        <button disabled={step >= (data?.last_step ?? Infinity)} onClick={() => pick(step + 1)} aria-label="step after">→</button>
        {data && !data.problem && <span class="muted">{count(data.count)} part{data.count === 1 ? "" : "s"} of documents{data.done ? "" : ", to come: the run is not there yet"}</span>}
        {data?.command && <Command text={data.command} />}
      </div>
      {error && <Problem error={error} />}
      {!data && !error && <div class="placeholder" />}
      {data?.problem && <Empty title={data.problem}>{data.hint && <p>{data.hint}</p>}</Empty>}
      {data && !data.problem && (
        <>
          <div class="scroll" tabIndex={0} role="region" aria-label={`documents of step ${step}`}>
            <table class="plain parts">
              <thead>
                <tr><th scope="col" class="num">row</th><th scope="col" class="num">document</th><th scope="col" class="num">tokens</th><th scope="col" class="num">bits</th><th scope="col">source</th><th scope="col">text</th></tr>
              </thead>
              <tbody>
                {data.parts.map((part, index) => (
                  <tr key={index} class={index && data.parts[index - 1].row !== part.row ? "next" : undefined}>
                    <td class="num">{part.row}</td>
                    <td class="num">{count(part.document)}</td>
                    <td class="num" title={`of ${count(part.tokens)}`}>{count(part.first)}–{count(part.end - 1)}</td>
                    <td class="num">{fixed(part.bits, 1)}{part.stands_out && <strong class="wrong"> stands out</strong>}</td>
                    <td class="source" title={part.source ?? undefined}>{part.source?.split("/").pop() ?? part.dataset}</td>
                    <td class="said">{part.text}{part.cut && "…"}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          {data.around && <p class="muted hint">Bits: how surprising the tokens of a part are, given those of the steps around it ({fixed(data.around[0], 1)} on average, {fixed(data.around[1], 1)} at most).</p>}
          {data.count > data.parts.length && (
            <div class="toolbar">
              <button disabled={first === 0} onClick={() => setFirst(Math.max(0, first - data.parts.length))}>Previous parts</button>
              <span class="muted">{first + 1} to {first + data.parts.length} of {count(data.count)}</span>
              <button disabled={first + data.parts.length >= data.count} onClick={() => setFirst(first + data.parts.length)}>Next parts</button>
            </div>
          )}
        </>
      )}
    </div>
  );
}
