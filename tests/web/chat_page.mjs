// Opens the server's page in headless Chromium and chats: node chat_page.mjs CHROMIUM URL < steps.
// Steps: a list of {set: {id: value}, click: id, key: text, say: text, stop: true}; each is done in that order.
// Prints JSON: after each step the phase, the line, the options and the turns; besides, every address asked for, and
// the console's errors.

import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";

const MINUTE = 60_000;
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
const steps = JSON.parse(readFileSync(0, "utf-8"));

function settled(page) {
  const over = () => !["loading", "running"].includes(document.body.dataset.phase);
  return page.waitForFunction(over, null, { timeout: 3 * MINUTE });
}

function seen(page) {
  return page.evaluate(() => ({
    phase: document.body.dataset.phase,
    state: document.getElementById("state").textContent,
    key_wanted: !document.getElementById("key-field").hidden,
    targets: [...document.querySelectorAll("#target option")].map((option) => option.value),
    learning: document.getElementById("learn").checked,
    turns: [...document.querySelectorAll("article")].map((turn) => ({
      role: turn.className,
      text: turn.textContent,
      pieces: [...turn.children].map((span) => [span.textContent, span.className === "drafted"]),
      colour: turn.querySelector(".drafted") && getComputedStyle(turn.querySelector(".drafted")).backgroundColor,
      counts: { ...turn.dataset },
    })),
  }));
}

async function take(page, step) {
  for (const [id, value] of Object.entries(step.set ?? {})) {
    const field = page.locator(`#${id}`);
    if (id === "target") await field.selectOption(value);
    else {
      await field.fill(value);
      await field.blur();
    }
  }
  if (step.click) await page.click(`#${step.click}`);
  if (step.say) {
    await page.fill("#prompt", step.say);
    await page.press("#prompt", "Enter");
  }
  if (step.stop) {
    await page.waitForFunction(() => document.querySelectorAll("article:last-child span").length > 2);
    await page.click("#stop");
  }
  await settled(page);
  return { ...(await seen(page)), live: await page.evaluate(() => globalThis.lines.splice(0)) };
}

const browser = await chromium.launch({ executablePath, args: ARGUMENTS });
try {
  const page = await browser.newPage();
  const requests = [];
  const errors = [];
  page.on("request", (request) => requests.push(request.url()));
  page.on("pageerror", (error) => errors.push(String(error)));
  await page.addInitScript(() => {
    globalThis.lines = []; // every line that was shown
    addEventListener("DOMContentLoaded", () => {
      const state = document.getElementById("state");
      const look = () => globalThis.lines.push(state.textContent);
      new MutationObserver(look).observe(state, { childList: true });
    });
  });
  await page.goto(url);
  await settled(page);
  const start = await seen(page);
  const after = [];
  for (const step of steps) after.push(await take(page, step));
  console.log(JSON.stringify({ start, after, requests, errors }));
} finally {
  await browser.close();
}
