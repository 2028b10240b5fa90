// Tags and a note of a run: the only thing that a page can change.
import { useState } from "preact/hooks";
import { address, refusal, Refused } from "./api";
import { Problem } from "./parts";
import type { Overview } from "./types";

export function Labels({ run, saved }: { run: Overview; saved: () => void }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      {run.tags?.map((tag) => <span class="tag" key={tag}>{tag}</span>)}
      <button class="ghost small" aria-expanded={open} onClick={() => setOpen(!open)}>{run.tags?.length || run.note ? "edit labels" : "add tags or a note"}</button>
      {open && <Form run={run} done={() => { setOpen(false); saved(); }} close={() => setOpen(false)} />}
    </>
  );
}

function Form({ run, done, close }: { run: Overview; done: () => void; close: () => void }) {
  const [tags, setTags] = useState(run.tags?.join(" ") ?? "");
  const [note, setNote] = useState(run.note ?? "");
  const [error, setError] = useState<Refused | null>(null);
  const save = async (event: Event) => {
    event.preventDefault();
    try {
      const answer = await fetch(address("/api/labels", { run: run.name }), {
        method: "POST",
        credentials: "same-origin",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ tags: tags.split(/[\s,]+/).filter(Boolean), note }),
      });
      if (!answer.ok) setError(await refusal(answer));
      else done();
    } catch {
      setError(new Refused("the server does not answer", 0, "start it again with headway ui"));
    }
  };
  return (
    <form class="labels" onSubmit={save}>
      {error && <Problem error={error} />}
      <label>tags, separated by spaces<input name="tags" value={tags} onInput={(event) => setTags(event.currentTarget.value)} /></label>
      <label>note<textarea name="note" rows={3} value={note} onInput={(event) => setNote(event.currentTarget.value)} /></label>
      <div class="toolbar"><button type="submit" class="primary">Save</button><button type="button" onClick={close}>Cancel</button></div>
    </form>
  );
}
