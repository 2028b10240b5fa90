// The frame of every page: where one is, where one can go, and how it looks.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { ClusterPage } from "./cluster";
import { ComparePage } from "./compare";
import { DataPage } from "./data";
import { ModelsPage } from "./models";
import { followLinks, go, useKeys, usePlace } from "./router";
import { RunPage } from "./run";
import { RunsPage } from "./runs";
import { apply, setTheme, theme, type Theme } from "./theme";

const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };

function App() {
  const { path } = usePlace();
  const [page, name, rest] = path;
  const [look, setLook] = useState(theme());
  useEffect(() => {
    document.addEventListener("click", followLinks);
    return () => document.removeEventListener("click", followLinks);
  }, []);
  useKeys((event) => {
    if (event.key === "/") {
      const field = document.querySelector<HTMLInputElement>("input[type=search]");
      if (field) field.focus();
      else go("/");
      event.preventDefault();
    }
    if (event.key === "g") go("/");
  });
  useEffect(() => {
    if (!page) document.title = "Runs – Headway";
  }, [page]);
  const change = () => {
    setTheme(NEXT[look]);
    setLook(NEXT[look]);
  };
  const link = (to: string, text: string, here: boolean) => <a href={to} aria-current={here ? "page" : undefined}>{text}</a>;
  return (
    <>
      <header class="top">
        <a class="brand" href="/">
          <svg viewBox="0 0 24 24" width="20" height="20" aria-hidden="true"><path d="M6 4v16M18 4v16M6 15l12-6" /></svg>
          Headway
        </a>
        <nav aria-label="pages">
          {link("/", "Runs", !page || page === "run")}
          {link("/compare", "Compare", page === "compare")}
          {link("/data", "Data", page === "data")}
          {link("/models", "Models", page === "models")}
          {link("/cluster", "Cluster", page === "cluster")}
        </nav>
        <button class="ghost" onClick={change} title={`change to ${NEXT[look]}`}><span class="narrow">theme: </span>{look}</button>
      </header>
      {!page ? <RunsPage /> :
        page === "run" && name ? <RunPage key={name} name={name} /> :
        page === "compare" ? <ComparePage /> :
        page === "data" ? <DataPage id={name ?? null} /> :
        page === "models" ? <ModelsPage /> :
        page === "cluster" ? <ClusterPage part={name ?? null} job={rest ?? null} /> : (
          <main><div class="nothing"><h1>Nothing is here</h1><p><a href="/">All runs</a></p></div></main>
        )}
    </>
  );
}

apply(theme());
render(<App />, document.getElementById("app")!);
