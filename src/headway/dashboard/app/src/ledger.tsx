// Where every device-second went: a waterfall from the allocation's start to its end, the plan beside it.
import { Card, Empty } from "./parts";
import { bytes, duration, fixed, percent, seconds, short } from "./format";
import type { Ledger, PlanFacts } from "./types";

export function LedgerCard({ ledger }: { ledger: Ledger | null }) {
  if (!ledger) return <Card title="Ledger">{<div class="placeholder tall" />}</Card>;
  if (!ledger.total_s)
    return (
      <Card title="Ledger">
        <Empty title="Nothing is accounted yet: the first attempt is starting." />
      </Card>
    );
  let before = 0;
  const largest = ledger.overhead?.account;
  const planned = ledger.accounts.some((account) => account.plan != null);
  return (
    <Card title="Ledger" aside={<span class="muted">{fixed(ledger.total_s, 1)} device-seconds</span>}>
      <table class="ledger">
        <thead>
          <tr>
            <th scope="col">account</th>
            <th scope="col" class="bar-head">
              <span class="hidden">from start to end of the allocation</span>
            </th>
            <th scope="col" class="num">seconds</th>
            <th scope="col" class="num">share</th>
            {planned && <th scope="col" class="num">plan</th>}
          </tr>
        </thead>
        <tbody>
          {ledger.accounts.map((account) => {
            const start = before;
            before += account.share;
            const kind =
              account.name === "compute" ? "useful" : account.name === largest ? "largest" : account.name === "unattributed" ? "open" : "";
            return (
              <tr key={account.name} class={kind}>
                <th scope="row">{account.name}</th>
                <td class="bar" aria-hidden="true">
                  <svg width="100%" height="14" preserveAspectRatio="none" viewBox="0 0 100 14">
                    <rect class="track" x="0" y="6.5" width="100" height="1" />
                    <rect class="part" x={100 * start} y="1" width={Math.max(0.6, 100 * account.share)} height="12" />
                    {account.plan != null && account.plan > 0 && (
                      <rect class="plan" x={Math.min(99.2, 100 * (start + account.plan))} y="0" width="0.8" height="14" />
                    )}
                  </svg>
                </td>
                <td class="num">{fixed(account.seconds, 1)}</td>
                <td class="num">{percent(account.share)}</td>
                {planned && <td class="num muted">{account.plan == null ? "–" : percent(account.plan)}</td>}
              </tr>
            );
          })}
        </tbody>
        <tfoot>
          <tr>
            <th scope="row">total</th>
            <td />
            <td class="num">{fixed(ledger.total_s, 1)}</td>
            <td class="num">100.0 %</td>
            {planned && <td />}
          </tr>
        </tfoot>
      </table>
      {ledger.overhead && (
        <p class="advice">
          <strong>Largest overhead: {ledger.overhead.account}</strong>, {fixed(ledger.overhead.seconds, 1)} device-seconds,{" "}
          {percent(ledger.overhead.share)}. {ledger.overhead.advice}
        </p>
      )}
    </Card>
  );
}

export function PlanCard({ plan }: { plan: PlanFacts }) {
  const mesh = Object.entries(plan.mesh).map(([axis, size]) => `${axis} ${size}`).join(", ") || "one worker";
  const parts = Object.entries(plan.accounts_s).filter(([, value]) => value / plan.step_s >= 0.005);
  const rows: [string, string, string, string][] = [
    ["step", seconds(plan.step_s), seconds(plan.measured_s), plan.off == null ? "–" : `${plan.off >= 0 ? "+" : "−"}${percent(Math.abs(plan.off), 0)}`],
    ["MFU", percent(plan.mfu), percent(plan.measured_mfu), ""],
    ["tokens/s", short(plan.tokens_per_s), plan.measured_s ? short((plan.tokens_per_s * plan.step_s) / plan.measured_s) : "–", ""],
    ["memory", bytes(plan.memory_bytes), "", `of ${bytes(plan.capacity_bytes)}`],
  ];
  return (
    <Card title="Plan" aside={<span class="muted">{plan.cluster}: {mesh}, microbatch {plan.microbatch}</span>}>
      <table class="plain">
        <thead>
          <tr>
            <th scope="col"><span class="hidden">quantity</span></th>
            <th scope="col" class="num">planned</th>
            {!plan.assumed && <th scope="col" class="num">measured</th>}
            <th scope="col" class="num"><span class="hidden">difference</span></th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, planned, measured, off]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              <td class="num">{planned}</td>
              {!plan.assumed && <td class="num">{measured}</td>}
              <td class="num muted">{plan.assumed && name === "step" ? "" : off}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="muted">
        Planned step: {parts.map(([name, value]) => `${name} ${percent(value / plan.step_s, 0)}`).join(", ")}.
        {plan.assumed && " The speed of this chip is assumed: there is nothing to compare a measurement with."}
      </p>
    </Card>
  );
}

export function Attempts({ ledger }: { ledger: Ledger }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="attempts">
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">attempt</th>
            <th scope="col">started</th>
            <th scope="col" class="num">took</th>
            <th scope="col">on</th>
            <th scope="col">resumed</th>
            <th scope="col">end</th>
          </tr>
        </thead>
        <tbody>
          {ledger.attempts.map((attempt) => (
            <tr key={attempt.number}>
              <td>{attempt.number}</td>
              <td>{new Date(attempt.started * 1000).toLocaleString("en-CA", { hour12: false })}</td>
              <td class="num">{duration(attempt.seconds)}</td>
              <td>{attempt.workers} × {attempt.device || "?"}</td>
              <td>{attempt.resumed_from == null ? "–" : `after step ${attempt.resumed_from}`}</td>
              <td class="wrap">{attempt.outcome ?? "no end recorded"}{attempt.reason && `: ${attempt.reason}`}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
