// What the page's modules make of the golden files: node golden.mjs noise|rounds < file. Prints JSON.

import { readFileSync } from "node:fs";
import { draft } from "../../web/drafting.mjs";
import { gumbel, keys } from "../../web/noise.mjs";
import { sampling } from "../../web/sampling.mjs";
import { Translation } from "../../web/translation.mjs";
import { verify } from "../../web/verification.mjs";

// Counters reach 2^64 - 1, which JSON.parse would round: they are read as texts, and made BigInt.
const quoted = (text) => text.replace(/"(seed|position)": (\d+)/g, '"$1": "$2"');

function noise({ cases }) {
  return cases.map((c) => c.ids.map((id) => gumbel(keys(c.seed, c.position), id)));
}

/** A drafter that is a table from paths to logits. */
function recorded(rows) {
  const table = new Map(rows.map(([path, row]) => [path.join(), Float32Array.from(row)]));
  return { room: 1000, logits: async (path) => table.get(path.join()) };
}

async function round(map, c) {
  const s = sampling({ ...c.sampling, seed: BigInt(c.sampling.seed) });
  const position = Number(c.position);
  const made = await draft(recorded(c.draft_logits), new Translation(map), s, position, c.k, c.ends);
  const rows = c.target_logits.map((row) => Float32Array.from(row));
  const proposed = made.map((proposal) => proposal.token);
  const proposals = made.map(({ token, kind, path }) => [token, kind, path]);
  return { proposals, ...verify(rows, proposed, c.history, s, position) };
}

const WORK = {
  noise,
  rounds: ({ map, cases }) => Promise.all(cases.map((c) => round(map, c))),
};

const golden = JSON.parse(quoted(readFileSync(0, "utf-8")));
console.log(JSON.stringify(await WORK[process.argv[2]](golden)));
