// Drives Chromium for tests and benchmarks: `node browser.mjs JSON`. Prints JSON; playwright-core and axe-core are those of
// the app's devDependencies.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const require = createRequire(new URL("../../src/headway/dashboard/app/package.json", import.meta.url));
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const request = JSON.parse(process.argv[2]);
const PATIENCE_MS = 1000 * (request.patience_s ?? 300); // beside other tests on two busy cores, pages are slow
const say = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);
const ARGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync";

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ARGS.split(" "),
});

/** Open a page as somebody who has opened the printed address before; collects what goes wrong. */
async function open({ width = 1440, height = 900, scheme = "light" } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, bypassCSP: false });
  const page = await context.newPage();
  const problems = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("request", (asked) => {
    if (!asked.url().startsWith(new URL(request.address).origin) && !asked.url().startsWith("data:")) problems.push(`asked ${asked.url()}`);
  });
  await page.goto(request.address);
  await page.waitForSelector("header.top");
  return { context, page, problems };
}

const at = (path) => new URL(request.address).origin + path;
const settled = (page) => page.waitForLoadState("load").then(() => page.waitForFunction(() => !document.querySelector(".placeholder"), null, { timeout: PATIENCE_MS }));

if (request.do === "draw") {
  const { page, problems } = await open();
  setTimeout(() => {
    process.stderr.write("nothing was drawn\n");
    process.exit(1);
  }, (request.ceiling_s ?? 900) * 1000).unref();
  const began = Date.now();
  await page.goto(at(request.path), { waitUntil: "commit" });
  const marks = await page.evaluate(
    () =>
      new Promise((resolve, reject) => {
        const found = {};
        const look = () => {
          const problem = document.querySelector(".problem");
          if (problem) return reject(new Error(problem.textContent));
          const canvas = document.querySelector(".chart canvas");
          const pixels = canvas?.width ? canvas.getContext("2d").getImageData(canvas.width / 3, 40, canvas.width / 3, canvas.height - 120).data : [];
          let coloured = 0; // pixels of a line: strongly one of red, green and blue
          for (let i = 0; i < pixels.length; i += 4)
            if (pixels[i + 3] > 100 && Math.max(pixels[i], pixels[i + 1], pixels[i + 2]) - Math.min(pixels[i], pixels[i + 1], pixels[i + 2]) > 60) coloured++;
          if (coloured >= 200) found.first_line_s ??= performance.now() / 1000;
          if (coloured < 200 || document.querySelector(".pending")) return setTimeout(look, 50);
          requestAnimationFrame(() => {
            const answers = performance.getEntriesByType("resource").filter((entry) => entry.name.includes("/api/series"));
            const last = answers[answers.length - 1];
            resolve({ seconds: performance.now() / 1000, ...found, requests: answers.length, server_s: last.responseEnd / 1000 - last.requestStart / 1000, kilobytes: last.decodedBodySize / 1000 });
          });
        };
        look();
      }),
  );
  say({ ...marks, wall_s: (Date.now() - began) / 1000, problems: problems.length });
} else if (request.do === "follow") {
  const { page } = await open();
  await page.goto(at(request.path));
  await page.waitForSelector("h1", { timeout: PATIENCE_MS });
  say({ ready: true });
  await page.waitForTimeout(request.seconds * 1000);
} else if (request.do === "visit") {
  for (const view of request.views) {
    const { context, page, problems } = await open(view);
    const found = { name: view.name, problems, serious: [], checks: {} };
    try {
      await page.goto(at(view.path));
      await settled(page);
      for (const selector of view.expect ?? []) await page.waitForSelector(selector, { timeout: PATIENCE_MS });
      for (const [act, ...words] of view.act ?? []) {
        if (act === "click") await page.click(words[0]);
        else if (act === "press") await page.keyboard.press(words[0]);
        else if (act === "fill") await page.fill(words[0], words[1]);
        else if (act === "wait") await page.waitForSelector(words[0], { timeout: PATIENCE_MS });
        else if (act === "text") await page.waitForFunction(([selector, text]) => document.querySelector(selector)?.textContent.includes(text), words, { timeout: PATIENCE_MS });
        else if (act === "drag") {
          const box = await page.locator(words[0]).first().boundingBox();
          await page.mouse.move(box.x + box.width * 0.3, box.y + box.height / 2);
          await page.mouse.down();
          await page.mouse.move(box.x + box.width * 0.6, box.y + box.height / 2, { steps: 5 });
          await page.mouse.up();
        }
      }
      found.url = page.url();
      found.text = await page.evaluate(() => document.body.innerText);
      found.wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      found.injected = await page.evaluate(() => window.injected ?? null);
      if (view.axe !== false) {
        // Through the debugger's own world: the page's policy lets no other script in.
        await page.evaluate(AXE);
        const result = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
        found.serious = result.violations
          .filter((violation) => ["serious", "critical"].includes(violation.impact))
          .map((violation) => `${violation.id}: ${violation.nodes.slice(0, 3).map((node) => node.target.join(" ")).join(", ")}`);
      }
      if (view.picture) await page.screenshot({ path: view.picture });
    } catch (error) {
      found.problems.push(`failed: ${error.message}`);
    }
    say(found);
    await context.close();
  }
}
await browser.close();
