// Light and dark: as the system has it, unless chosen here. The choice is the one thing that the browser keeps.

const KEY = "headway-theme";
const listeners = new Set<() => void>();

export type Theme = "auto" | "light" | "dark";

export function theme(): Theme {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "light" || kept === "dark" ? kept : "auto";
  } catch {
    return "auto";
  }
}

export function setTheme(next: Theme): void {
  try {
    if (next === "auto") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
  } catch {
    // a browser that keeps nothing: for this page only
  }
  apply(next);
}

const system = matchMedia("(prefers-color-scheme: dark)");

export function apply(chosen: Theme): void {
  document.documentElement.dataset.theme = chosen !== "auto" ? chosen : system.matches ? "dark" : "light";
  listeners.forEach((listener) => listener());
}

/** Calls back when colours have changed; returns what ends that. */
export function onTheme(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

system.addEventListener("change", () => apply(theme()));
