// Small parts that several pages share.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Refused } from "./api";

const SHAPES: Record<string, string> = {
  running: "●",
  finished: "✓",
  stopped: "■",
  failed: "✕",
  interrupted: "▲",
  submitted: "○",
  unreadable: "?",
  waiting: "○",
  held: "‖",
  ending: "◐",
  cancelled: "■",
  impossible: "✕",
};

/** A state, told by shape and word; colour only helps. */
export function State({ state }: { state: string }) {
  return (
    <span class={`state ${state}`}>
      <span aria-hidden="true">{SHAPES[state] ?? "·"}</span> <span class="word">{state}</span>
    </span>
  );
}

export function Problem({ error }: { error: Refused }) {
  return (
    <div class="problem" role="alert">
      <strong>{error.message}</strong>
      {error.hint && <p>{error.hint}</p>}
      {error.status === 401 && <p>Open the address that headway ui printed.</p>}
    </div>
  );
}

/** What to do where nothing is to be seen. */
export function Empty({ title, command, children }: { title: string; command?: string; children?: ComponentChildren }) {
  return (
    <div class="nothing">
      <p>{title}</p>
      {command && <Command text={command} />}
      {children}
    </div>
  );
}

export function Command({ text }: { text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = () => {
    void navigator.clipboard?.writeText(text).then(() => {
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    });
  };
  return (
    <span class="command">
      <code>{text}</code>
      <button class="ghost small" onClick={copy} aria-label={`${copied ? "copied" : "copy"} ${text}`}>
        {copied ? "copied" : "copy"}
      </button>
    </span>
  );
}

export function Fact({ label, children, wide }: { label: string; children: ComponentChildren; wide?: boolean }) {
  return (
    <div class={wide ? "fact wide" : "fact"}>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

export function Card({ title, aside, children, id }: { title: string; aside?: ComponentChildren; children: ComponentChildren; id?: string }) {
  return (
    <section class="card" id={id} aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

/** A list of choices of which one is active; arrows move between them. */
export function Tabs({ names, active, onPick, label }: { names: [string, string][]; active: string; onPick: (name: string) => void; label: string }) {
  const move = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.preventDefault();
    const index = names.findIndex(([name]) => name === active);
    const next = names[(index + step + names.length) % names.length][0];
    onPick(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label={label} onKeyDown={move}>
      {names.map(([name, text]) => (
        <button
          key={name}
          id={`tab-${name}`}
          role="tab"
          aria-selected={name === active}
          aria-controls="panel"
          tabIndex={name === active ? 0 : -1}
          onClick={() => onPick(name)}
        >
          {text}
        </button>
      ))}
    </div>
  );
}
