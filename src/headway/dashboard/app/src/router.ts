// Every view has an address: a path and a query, both kept by the browser's history.
import { useEffect, useRef, useState } from "preact/hooks";

const CHANGED = "headway:address";

export interface Place {
  path: string[];
  query: URLSearchParams;
}

function here(): Place {
  const parts = location.pathname.split("/").filter(Boolean).map(decodeURIComponent);
  return { path: parts, query: new URLSearchParams(location.search) };
}

export function usePlace(): Place {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const update = () => setPlace(here());
    addEventListener("popstate", update);
    addEventListener(CHANGED, update);
    return () => {
      removeEventListener("popstate", update);
      removeEventListener(CHANGED, update);
    };
  }, []);
  return place;
}

export function go(url: string, replace = false): void {
  if (replace) history.replaceState(null, "", url);
  else {
    history.pushState(null, "", url);
    scrollTo(0, 0);
  }
  dispatchEvent(new Event(CHANGED));
}

/** Change some parameters of the current address; empty ones are removed. */
export function setQuery(changes: Record<string, string | string[] | null>): void {
  const query = new URLSearchParams(location.search);
  for (const [key, value] of Object.entries(changes)) {
    query.delete(key);
    if (Array.isArray(value)) value.forEach((part) => query.append(key, part));
    else if (value) query.set(key, value);
  }
  const text = query.toString();
  go(location.pathname + (text ? `?${text}` : ""), true);
}

/** Links within the app change the address without loading the page again. */
export function followLinks(event: MouseEvent): void {
  const link = (event.target as Element).closest?.("a");
  if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.defaultPrevented) return;
  if (link.pathname.startsWith("/files") || link.pathname.startsWith("/api/")) return;
  if (link.hash && link.pathname === location.pathname) return;
  event.preventDefault();
  go(link.pathname + link.search);
}

export const runUrl = (name: string, query = "") => `/run/${encodeURIComponent(name)}${query}`;

/** Calls back for keys pressed outside of fields; always with the newest state, however fast keys follow each other. */
export function useKeys(press: (event: KeyboardEvent) => void): void {
  const newest = useRef(press);
  newest.current = press;
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if ((event.target as Element).matches?.("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      newest.current(event);
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
}
