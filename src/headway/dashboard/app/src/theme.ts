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

export function apply(chosen: Theme): void {
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  listeners.forEach((listener) => listener());
}

/** Calls back when colours have changed; returns what ends that. */
export function onTheme(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((listener) => listener()));
