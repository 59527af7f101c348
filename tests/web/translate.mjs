// How draft ids are translated by a map: reads [{map, ids}], prints {kinds, pieces} for each.

import { readFileSync } from "node:fs";
import { Translation } from "../../web/translation.mjs";

const cases = JSON.parse(readFileSync(0, "utf-8"));
const made = cases.map(({ map, ids }) => {
  const translation = new Translation(map);
  return { kinds: ids.map((id) => translation.kind(id)), pieces: ids.map((id) => translation.pieces[id]) };
});
console.log(JSON.stringify(made));
