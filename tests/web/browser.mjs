// Opens the page in headless Chromium and lets it answer: node browser.mjs CHROMIUM URL < jobs.
// Jobs: a list of settings, {id of a form field: value}. Prints JSON: for each job the tokens, which of them were
// drafted, the counts and the closing line; besides these every address that was asked for, and the console's errors.

import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";

const MINUTES = 60_000;
const ARGUMENTS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

const [executablePath, url] = process.argv.slice(2);
const jobs = JSON.parse(readFileSync(0, "utf-8"));

async function answer(page, settings) {
  for (const [id, value] of Object.entries(settings)) {
    const field = page.locator(`#${id}`);
    await (id === "draft" ? field.selectOption(value) : field.fill(value));
  }
  await page.click("#run");
  await page.waitForFunction(() => document.body.dataset.phase !== "running", null, { timeout: 3 * MINUTES });
  return page.evaluate(() => {
    const spans = [...document.querySelectorAll("#answer span")];
    return {
      tokens: spans.map((span) => Number(span.dataset.token)),
      drafted: spans.map((span) => span.className === "drafted"),
      text: document.getElementById("answer").textContent,
      counts: { ...document.getElementById("answer").dataset },
      state: document.getElementById("state").textContent,
    };
  });
}

const browser = await chromium.launch({ executablePath, args: ARGUMENTS });
try {
  const page = await browser.newPage();
  const requests = [];
  const errors = [];
  page.on("request", (request) => requests.push(request.url()));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  await page.goto(url);
  await page.waitForFunction(() => document.body.dataset.phase !== "loading", null, { timeout: 3 * MINUTES });
  const start = { phase: await page.getAttribute("body", "data-phase"), state: await page.textContent("#state") };
  const answers = [];
  if (start.phase === "ready") for (const job of jobs) answers.push(await answer(page, job));
  console.log(JSON.stringify({ start, answers, requests, errors }));
} finally {
  await browser.close();
}
