// The settings of a run, and which of them its parent had otherwise.
import { useState } from "preact/hooks";
import { useAsk } from "./api";
import { setting } from "./format";
import { Empty, Problem } from "./parts";
import { runUrl } from "./router";
import type { Overview, Parent, RecipeRow } from "./types";

export function RecipeView({ run }: { run: Overview }) {
  const { data, error } = useAsk<{ parent: Parent | null; rows: RecipeRow[]; problem: string | null }>("/api/recipe", { run: run.name });
  const [find, setFind] = useState("");
  const [only, setOnly] = useState(false);
  if (error) return <Problem error={error} />;
  if (!data) return <div class="placeholder" />;
  if (data.problem) return <Empty title={data.problem} />;
  const compared = data.rows.some((row) => row.changed !== undefined);
  const changed = data.rows.filter((row) => row.changed).length;
  const rows = data.rows.filter((row) => row.key.includes(find.trim()) && (!only || row.changed));
  const sections = [...new Set(rows.map((row) => (row.key.includes(".") ? row.key.split(".")[0] : "")))];
  return (
    <div class="recipe">
      <div class="toolbar">
        <input type="search" placeholder="find a key" aria-label="find a key" value={find} onInput={(event) => setFind(event.currentTarget.value)} />
        {compared && (
          <label><input type="checkbox" checked={only} onChange={() => setOnly(!only)} /> only the {changed} that differ from{" "}
            <a href={runUrl(data.parent!.run)}>{data.parent!.run}</a></label>
        )}
      </div>
      <div class="sections">
        {sections.map((section) => (
          <table class="plain" key={section}>
            <caption>{section || "recipe"}</caption>
            <tbody>
              {rows.filter((row) => (row.key.includes(".") ? row.key.split(".")[0] : "") === section).map((row) => (
                <tr key={row.key} class={row.changed ? "changed" : undefined}>
                  <th scope="row">{section ? row.key.slice(section.length + 1) : row.key}</th>
                  <td class="wrap">
                    {row.changed && <><del>{setting(row.before)}</del> <span aria-hidden="true">→</span> </>}
                    {row.changed ? <ins>{setting(row.value)}</ins> : setting(row.value)}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        ))}
      </div>
    </div>
  );
}
