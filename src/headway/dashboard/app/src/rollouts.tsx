// Reinforcement learning: which prompts were answered how, and what each answer was worth.
import { useEffect, useMemo, useState } from "preact/hooks";
import { useAsk } from "./api";
import { count, fixed, number } from "./format";
import { Empty, Problem } from "./parts";
import { setQuery, usePlace } from "./router";
import type { Answer, Batch, Group, Overview } from "./types";

export function Rollouts({ run, round }: { run: Overview; round: number }) {
  const { query } = usePlace();
  const list = useAsk<{ steps: number[] }>("/api/rollouts", { run: run.name });
  useEffect(list.again, [round]);
  const steps = list.data?.steps ?? [];
  const wanted = Number(query.get("batch"));
  const step = steps.includes(wanted) ? wanted : (steps[steps.length - 1] ?? null);
  const [first, setFirst] = useState(0);
  useEffect(() => setFirst(0), [step]);
  const { data, error } = useAsk<Batch>(step === null ? null : "/api/rollouts", { run: run.name, step, first });
  if (list.error) return <Problem error={list.error} />;
  if (!list.data) return <div class="placeholder" />;
  if (step === null) return <Empty title={run.state === "running" ? "The first answers are being sampled." : "No rollouts are kept in this run."} command={run.commands.logs} />;
  const index = steps.indexOf(step);
  const pick = (next: number) => setQuery({ batch: String(steps[next]) });
  return (
    <div class="rollouts">
      <div class="toolbar">
        <button disabled={index <= 0} onClick={() => pick(index - 1)} aria-label="earlier batch">←</button>
        <label class="slider">
          batch of step
          <input type="range" min="0" max={steps.length - 1} value={index} onInput={(event) => pick(Number(event.currentTarget.value))} aria-label="batch" />
          <output>{count(step)}</output>
        </label>
        <button disabled={index >= steps.length - 1} onClick={() => pick(index + 1)} aria-label="later batch">→</button>
        {data && !data.problem && <span class="muted">{count(data.answers)} answers to {count(data.count)} prompts, weights after step {count(data.version)}{data.failed > 0 && `, ${data.failed} rewards failed`}</span>}
      </div>
      {error && <Problem error={error} />}
      {data?.problem && <Empty title={data.problem} />}
      {data && !data.problem && (
        <>
          <div class="spread">
            <Histogram values={data.rewards} />
            <dl class="facts compact">
              {Object.entries(data.metrics).slice(0, 12).map(([name, value]) => <div class="fact" key={name}><dt>{name}</dt><dd>{number(value)}</dd></div>)}
            </dl>
          </div>
          {data.groups.map((group) => <GroupView key={group.group} group={group} />)}
          {data.count > data.groups.length && (
            <div class="toolbar">
              <button disabled={first === 0} onClick={() => setFirst(Math.max(0, first - 8))}>Previous prompts</button>
              <span class="muted">{first + 1} to {first + data.groups.length} of {count(data.count)}</span>
              <button disabled={first + data.groups.length >= data.count} onClick={() => setFirst(first + 8)}>Next prompts</button>
            </div>
          )}
        </>
      )}
    </div>
  );
}

/** How rewards are spread over the answers of a batch. */
function Histogram({ values }: { values: number[] }) {
  const bars = useMemo(() => {
    const low = Math.min(...values);
    const high = Math.max(...values);
    const size = low === high ? 1 : Math.min(24, Math.max(6, new Set(values).size));
    const bins = Array.from({ length: size }, () => 0);
    for (const value of values) bins[Math.min(size - 1, Math.floor((size * (value - low)) / (high - low || 1)))]++;
    return { low, high, bins, most: Math.max(...bins) };
  }, [values]);
  if (!values.length) return null;
  const width = 240 / bars.bins.length;
  return (
    <figure class="histogram" role="img" aria-label={`rewards of ${values.length} answers, from ${number(bars.low)} to ${number(bars.high)}`}>
      <svg viewBox="0 0 240 60" width="240" height="60">
        {bars.bins.map((size, index) => (
          <rect key={index} x={index * width + 0.5} width={width - 1} y={58 - (54 * size) / bars.most} height={(54 * size) / bars.most + 2} />
        ))}
      </svg>
      <figcaption>{bars.low === bars.high ? <span>every reward is {number(bars.low)}</span> : <><span>{number(bars.low)}</span><span>rewards</span><span>{number(bars.high)}</span></>}</figcaption>
    </figure>
  );
}

function GroupView({ group }: { group: Group }) {
  const rewards = group.answers.map((answer) => answer.reward).filter((reward): reward is number => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const answers = [...group.answers].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return (
    <section class="card group" aria-label={`prompt ${group.sample}`}>
      <header>
        <h3>Prompt {count(group.sample)}</h3>
        <span class="muted">mean reward {fixed(mean, 3)}{group.step === null && ", left out"}</span>
      </header>
      <pre class="prompt" role="region" tabIndex={0} aria-label="prompt">{group.prompt_text}</pre>
      <table class="plain answers">
        <thead>
          <tr><th scope="col" class="num">reward</th><th scope="col" class="num">advantage</th><th scope="col" class="num">tokens</th><th scope="col">answer</th></tr>
        </thead>
        <tbody>{answers.map((answer) => <AnswerRow key={answer.answer} answer={answer} />)}</tbody>
      </table>
    </section>
  );
}

function AnswerRow({ answer }: { answer: Answer }) {
  const terms = Object.entries(answer.rewards ?? {});
  return (
    <tr class={answer.in_loss ? undefined : "unused"}>
      <td class="num">{fixed(answer.reward, 3)}</td>
      <td class="num muted">{answer.advantage === null ? "–" : `${answer.advantage >= 0 ? "+" : "−"}${Math.abs(answer.advantage).toFixed(2)}`}</td>
      <td class="num muted">{answer.tokens}{answer.finish !== "stop" && <span title={`ended by ${answer.finish}`}> cut</span>}</td>
      <td class="wrap">
        <span class="said">{answer.text || <em class="muted">empty</em>}</span>
        {terms.length > 1 && <span class="muted terms">{terms.map(([name, value]) => `${name} ${number(value)}`).join("  ")}</span>}
        {answer.error && <span class="wrong terms">{answer.error.trim().split("\n").pop()}</span>}
      </td>
    </tr>
  );
}

