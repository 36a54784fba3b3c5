#!/usr/bin/env python3
"""Checks the prose of code and documents against the project's rules.

* A line has at most 120 columns, a row of a Markdown table at most 200.
* No phrase of the deny-list.
* The summary of a public item of Rust does not begin with a word that only makes sense after another sentence; the
  summary of a public function begins with a verb in the third person.
* The glossary has every noun that the kernels use in a sense of their own.

Without arguments it reads all tracked files. `--self-test` plants one fault of each kind and expects to find it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, TABLE_COLUMNS = 120, 200

# Files whose long lines are sed scripts, which cannot be broken.
WIDE = {"lab/ptx_machine/plants.sh"}

# A phrase, as a pattern that does not match itself, and what to write instead.
DENIED = {
    r"\bso[ ]many\b": "N, or: the number of",
    r"\bbut[ ]for\b": "except",
    r"\bmade[ ]of (it|them)\b": "say what happens to it",
    r"\bswitch(es)?( \w+)*? adds?[ ]up\b": "in-switch reduction",
    r"\bputs?[ ]up\b": "announces",
    r"\bwho[e]ver\b": "the caller, or: the rank that",
    r"\ba[n]ew\b": "again",
    r"\bone[ ]behind the other\b": "consecutive",
    r"\bsel[d]om\b": "rarely",
    r"\bas[ ]many as there (are|is)\b": "all",
    r"[<>]{7} \w": "resolve the conflict",
}

# Files that are not read: lock files, recorded data and inputs of decoders are not prose; patches quote other files.
SKIPPED = re.compile(
    r"(^|/)(Cargo\.lock|LICENSE-.*|fuzz/corpus/.*)$|\.(lock|json|svg|html|patch|txt|proptest-regressions|png|toml)$"
)

# Forbidden first words of summaries: they refer to an earlier sentence or leave out the subject.
FIRST_WORDS = ("The same", "Of ", "As ", "In place", "But ", "And ", "So ")

# Permitted first words of the summaries of public functions.
VERBS = set(
    """Abandons Aborts Accepts Adds Adopts Aligns Allocates Announces Appends Applies Asks Asserts Assigns Attaches
    Begins Binds Borrows Brings Broadcasts Builds Calls Captures Casts Changes Checks Chooses Clears Clones Closes
    Collects Compares Completes Computes Configures Connects Converts Copies Counts Creates Decodes Deregisters
    Describes Destroys Detects Divides Drops Dumps Encodes Ends Enqueues Ensures Enters Estimates Exchanges Executes
    Exports Extends Fills Finds Finishes Fits Flushes Formats Forms Forwards Frees Gathers Generates Gets Gives
    Handles Hashes Holds Identifies Ignores Imports Includes Initialises Installs Iterates Joins Keeps Launches
    Leaves Lets Limits Lists Loads Locks Logs Looks Makes Maps Marks Matches Measures Merges Moves Multiplies Names
    Normalises Notes Notifies Opens Orders Overrides Packs Parses Passes Performs Picks Places Plans Poisons Polls
    Posts Prefers Prepares Prints Probes Publishes Pulls Pushes Puts Quantises Queries Queues Reads Receives
    Recommends Records Reduces Refuses Registers Rejects Releases Reloads Removes Renames Reopens Replaces Replays
    Reports Requests Requires Reserves Resets Resolves Restores Retries Returns Reuses Rounds Runs Samples Saves
    Scatters Searches Selects Sends Separates Serialises Serves Sets Shares Shows Shrinks Shuts Signals Skips Sleeps
    Sorts Spawns Specifies Splits Stages Starts States Stops Stores Submits Sums Swaps Switches Synchronises Takes
    Tells Tests Times Tries Turns Unlocks Unmaps Unpacks Unregisters Updates Uses Validates Verifies Views Visits
    Waits Wakes Watches Withdraws Wraps Writes Yields Zeroes""".split()
)

GLOSSARY = """pack piece slice share slot stripe chunk window source team claim credit rank region staging mailbox
    signal packet epoch generation channel sink epilogue""".split() + ["hot set"]


def tracked(paths):
    command = ["git", "ls-files", "-z", "--", *paths]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in found.split("\0") if name and not SKIPPED.search(name)]


def too_wide(name, lines):
    if name in WIDE:
        return
    fenced = False
    for number, line in enumerate(lines, 1):
        if name.endswith(".md") and line.startswith("```"):
            fenced = not fenced
        table = name.endswith(".md") and not fenced and line.startswith("|")
        # A URL cannot be broken.
        if len(line) > (TABLE_COLUMNS if table else COLUMNS) and not re.fullmatch(r"\W*\S*https?://\S+", line):
            yield number, f"{len(line)} columns"


def denied(lines):
    """Yields phrases of the deny-list, including phrases across a line break."""
    text = "\n".join(lines)
    # A comment marker at the start of a line does not interrupt a phrase.
    joined = re.sub(r"\n[ \t]*(//[/!]?|#|\*)?[ \t]*", lambda m: " " * len(m.group()), text)
    for phrase, instead in DENIED.items():
        for found in re.finditer(phrase.replace(" ", " +").replace("[ +]", " +"), joined, re.IGNORECASE):
            words = " ".join(found.group().split())
            yield text.count("\n", 0, found.start()) + 1, f'"{words}": write {instead}'


QUALIFIERS = r"(?:(?:const|async|unsafe|extern \"C\") )*"
PUBLIC = re.compile(rf"\s*pub {QUALIFIERS}(fn|struct|enum|trait|type|const|static|mod|union|use)\b")


def summaries(name, lines):
    """Yields faults in the first words of public items' summaries."""
    if not name.endswith(".rs") or not name.startswith(("src/", "capi/", "catalogue/", "adapters/")):
        return
    start, brackets = None, 0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("///"):
            start = start or number
            continue
        # An attribute may take several lines.
        if brackets or text.startswith(("#[", "#![")):
            brackets += text.count("[") - text.count("]")
            continue
        if start is not None:
            item = PUBLIC.match(line)
            summary = lines[start - 1].strip()[3:].strip()
            if item:
                if summary.startswith(FIRST_WORDS):
                    yield start, f'the summary begins with "{" ".join(summary.split()[:2])}"'
                first = summary.split(maxsplit=1)[0] if summary else ""
                if item.group(1) == "fn" and not summary.startswith(FIRST_WORDS) and first.strip(",.:") not in VERBS:
                    yield start, f'the summary of a function begins with "{first}", which is not in the list of verbs'
        start = None


def faults(name, text):
    lines = text.split("\n")
    yield from too_wide(name, lines)
    yield from denied(lines)
    yield from summaries(name, lines)


def missing_words(glossary):
    rows = [line.split("|")[1] for line in glossary.splitlines() if line.startswith("|")]
    words = {word.strip() for row in rows for word in row.split(",")}
    return [word for word in GLOSSARY if word not in words]


def self_test():
    planted = {
        "a.md": "x" * 121,
        "b.md": "| " + "x" * 199,
        "c.rs": "// Takes so" + " many ranks.",
        "d.rs": "// Takes so" + "\n    // many ranks.",
        "src" "/e.rs": "/// The same for a rank.\npub struct Rank;",
        "src" "/f.rs": "/// Number of ranks.\n#[inline]\npub unsafe fn ranks() {}",
    }
    for name, text in planted.items():
        assert len(list(faults(name, text))) == 1, name
    fine = {
        "a.md": "x" * 120 + "\n| " + "x" * 150 + "\n* https://" + "x" * 150,
        "src" "/b.rs": "/// Returns the number of ranks.\npub fn ranks() {}\n/// Number of ranks.\nfn count() {}",
    }
    for name, text in fine.items():
        assert not list(faults(name, text)), name
    assert missing_words("| word |\n|---|\n| pack, piece |") == [w for w in GLOSSARY if w not in ("pack", "piece")]
    print("each planted fault was found")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    read = found = 0
    for name in tracked(sys.argv[1:]):
        read += 1
        for number, fault in faults(name, (ROOT / name).read_text(encoding="utf-8")):
            print(f"{name}:{number}: {fault}")
            found += 1
    for word in missing_words((ROOT / "docs/glossary.md").read_text(encoding="utf-8")):
        print(f"docs/glossary.md: no row for {word}")
        found += 1
    assert read, "no file was read"
    print(f"{found} faults in {read} files")
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
