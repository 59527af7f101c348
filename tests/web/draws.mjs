// Draws from rows of logits: reads [{logits, history, sampling, position}], prints the tokens drawn.

import { readFileSync } from "node:fs";
import { draw, sampling } from "../../web/sampling.mjs";

const cases = JSON.parse(readFileSync(0, "utf-8"));
const tokens = cases.map((c) => {
  const s = sampling({ ...c.sampling, seed: BigInt(c.sampling.seed) });
  return draw(Float32Array.from(c.logits), c.history, s, c.position);
});
console.log(JSON.stringify(tokens));
