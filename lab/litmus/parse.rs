//! The parser of `.litmus` files; README.md describes the format.

use crate::program::{
    Atom, Case, Condition, Expression, Instruction, Load, Pattern, Place, Program, Question, Scope, Store,
    Strength, Thread, Value,
};

/// Returns all cases of a file: the program itself, then its variants. An error names the line.
pub fn cases(text: &str) -> Result<Vec<Case>, String> {
    let mut parser = Parser::default();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            parser.line(line).map_err(|error| format!("line {}: {error}: {line}", index + 1))?;
        }
    }
    parser.finish()
}

#[derive(Default)]
struct Parser {
    /// The base case, then each variant; the last one is still being parsed.
    cases: Vec<Case>,
    cta: usize,
    ctas: usize,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(name) = line.strip_prefix("litmus ") {
            return self.begin(name.trim());
        }
        if let Some(name) = line.strip_prefix("variant ") {
            let mut case = self.cases.first().ok_or("a variant of nothing")?.clone();
            case.program.name = format!("{}, {}", case.program.name, name.trim());
            case.expect.clear();
            self.cases.push(case);
            return Ok(());
        }
        let variant = self.cases.len() > 1;
        let case = self.cases.last_mut().ok_or("the first line must be: litmus <name>")?;
        if let Some(rest) = line.strip_prefix("expect ") {
            case.expect = expectations(rest)?;
            return Ok(());
        }
        if line == "control dependencies ignored" {
            case.program.control_dependencies = false;
            return Ok(());
        }
        if line == "all on one gpu" {
            case.program.gpus.fill(0);
            return Ok(());
        }
        if variant {
            return replace(&mut case.program, line);
        }
        self.base(line)
    }

    fn begin(&mut self, name: &str) -> Result<(), String> {
        if !self.cases.is_empty() {
            return Err("a second program".into());
        }
        let program = Program {
            name: name.into(),
            gpus: Vec::new(),
            threads: Vec::new(),
            initial: Vec::new(),
            outcome: Vec::new(),
            control_dependencies: true,
        };
        self.cases.push(Case { program, expect: Vec::new() });
        Ok(())
    }

    /// Parses a line of the program itself.
    fn base(&mut self, line: &str) -> Result<(), String> {
        let program = &mut self.cases[0].program;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["rank", "on", "gpu", gpu] => {
                program.gpus.push(gpu.parse().map_err(|_| "not a GPU's number")?);
            }
            ["cta"] => {
                self.cta = self.ctas;
                self.ctas += 1;
            }
            ["thread", name] => {
                let rank = program.gpus.len().checked_sub(1).ok_or("a thread needs a rank")?;
                if self.ctas == 0 {
                    return Err("a thread needs a cta".into());
                }
                let thread = Thread { name: name.into(), rank, cta: self.cta, body: Vec::new() };
                program.threads.push(thread);
            }
            ["init", place, "=", value] => {
                let pattern = pattern(value)?;
                let data = pattern.data.ok_or("data missing")?;
                program.initial.push((bracketed(place)?.into(), Value { data, tag: pattern.tag }));
            }
            ["outcome", ..] => program.outcome = condition(line["outcome".len()..].trim())?,
            _ => {
                let thread = program.threads.last_mut().ok_or("an instruction needs a thread")?;
                let (label, body) = match line.split_once(':') {
                    Some((label, body)) => (Some(label.trim().to_string()), body),
                    None => (None, line),
                };
                for instruction in instructions(body)? {
                    thread.body.push((label.clone(), instruction));
                }
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Case>, String> {
        if self.cases.is_empty() {
            return Err("no program".into());
        }
        for case in &self.cases {
            if case.expect.is_empty() {
                return Err(format!("{}: expects nothing", case.program.name));
            }
        }
        Ok(self.cases)
    }
}

/// Parses `label: instruction; instruction` or `label: removed`, and replaces all instructions with that
/// label.
fn replace(program: &mut Program, line: &str) -> Result<(), String> {
    let (label, new) = line.split_once(':').ok_or("a variant's line is: label: instruction")?;
    let label = label.trim();
    let new = if new.trim() == "removed" { Vec::new() } else { instructions(new)? };
    let mut found = false;
    for thread in &mut program.threads {
        let mut body = Vec::new();
        for (old_label, old) in thread.body.drain(..) {
            if old_label.as_deref() == Some(label) {
                found = true;
                body.extend(new.iter().map(|instruction| (None, instruction.clone())));
            } else {
                body.push((old_label, old));
            }
        }
        thread.body = body;
    }
    if found {
        Ok(())
    } else {
        Err(format!("no instruction is labelled {label}"))
    }
}

fn expectations(text: &str) -> Result<Vec<(Question, bool)>, String> {
    text.split(',')
        .map(|item| {
            let words: Vec<&str> = item.split_whitespace().collect();
            let [question, answer] = words[..] else { return Err("expect <question> <answer>".to_string()) };
            let question = Question::ALL
                .into_iter()
                .find(|known| known.name() == question)
                .ok_or(format!("{question} is not outcome, race or hang"))?;
            match answer {
                "never" => Ok((question, false)),
                "sometimes" => Ok((question, true)),
                _ => Err(format!("{answer} is not never or sometimes")),
            }
        })
        .collect()
}

fn instructions(text: &str) -> Result<Vec<Instruction>, String> {
    text.split(';').map(|one| instruction(one.trim())).collect()
}

fn instruction(text: &str) -> Result<Instruction, String> {
    let (mnemonic, operands) = text.split_once(' ').unwrap_or((text, ""));
    let parts: Vec<&str> = mnemonic.split('.').collect();
    match parts[..] {
        ["nop"] => Ok(Instruction::Nop),
        ["launch"] => Ok(Instruction::Launch),
        ["bar", "sync"] => Ok(Instruction::Barrier),
        ["fence", "proxy", "alias"] => Ok(Instruction::AliasFence),
        ["fence", "sc", at] => Ok(Instruction::Fence { sc: true, scope: scope(at)? }),
        ["fence", "acq_rel", at] => Ok(Instruction::Fence { sc: false, scope: scope(at)? }),
        ["st", ref qualifiers @ ..] => {
            let (strength, elements) = strength(qualifiers, "release")?;
            Ok(Instruction::Store(strength, stores(operands, elements)?))
        }
        ["ld", ref qualifiers @ ..] => {
            let (strength, elements) = strength(qualifiers, "acquire")?;
            Ok(Instruction::Load(strength, loads(operands, elements)?))
        }
        _ => Err(format!("{mnemonic} is not known")),
    }
}

fn scope(text: &str) -> Result<Scope, String> {
    match text {
        "cta" => Ok(Scope::Cta),
        "gpu" => Ok(Scope::Gpu),
        "sys" => Ok(Scope::Sys),
        _ => Err(format!("{text} is not a scope")),
    }
}

/// Parses the strength, and the number of elements of the vector.
fn strength(qualifiers: &[&str], synchronizing: &str) -> Result<(Strength, usize), String> {
    let (qualifiers, elements) = match qualifiers {
        [rest @ .., "v2"] => (rest, 2),
        [rest @ .., "v4"] => (rest, 4),
        all => (all, 1),
    };
    let strength = match qualifiers {
        ["weak"] => Strength::Weak,
        ["relaxed", at] => Strength::Relaxed(scope(at)?),
        [kind, at] if *kind == synchronizing => Strength::Synchronizing(scope(at)?),
        _ => return Err(format!("qualifiers are weak, relaxed.<scope> or {synchronizing}.<scope>")),
    };
    Ok((strength, elements))
}

/// Parses `[x], 1` or `[x y], {1, 2}`.
fn stores(text: &str, elements: usize) -> Result<Vec<Store>, String> {
    let (places, values) = text.split_once(']').ok_or("an address is in brackets")?;
    let places = words(places.trim().trim_start_matches('['), elements)?;
    let values = list(values.trim().trim_start_matches(','), elements)?;
    places
        .iter()
        .zip(values)
        .map(|(place, value)| {
            let (location, alias) = location(place);
            Ok(Store { location, alias, value: expression(value)? })
        })
        .collect()
}

/// Parses `r, [x]` or `{r, s}, [x y]`, and, in a poll, `until 1` or `until {1, 2}`.
fn loads(text: &str, elements: usize) -> Result<Vec<Load>, String> {
    let (access, until) = match text.split_once(" until ") {
        Some((access, until)) => (access, Some(list(until, elements)?)),
        None => (text, None),
    };
    let (registers, places) = access.split_once('[').ok_or("an address is in brackets")?;
    let registers = list(registers.trim().trim_end_matches(','), elements)?;
    let places = words(places.trim().trim_end_matches(']'), elements)?;
    let mut result = Vec::new();
    for element in 0..elements {
        let until = until.as_ref().map(|until| pattern(until[element])).transpose()?;
        let ((location, alias), register) = (location(places[element]), registers[element].into());
        result.push(Load { location, alias, register, until });
    }
    Ok(result)
}

/// Parses `x`, or `x'` for its second alias.
fn location(text: &str) -> (String, bool) {
    let stripped = text.strip_suffix('\'');
    (stripped.unwrap_or(text).to_string(), stripped.is_some())
}

fn words(text: &str, expected: usize) -> Result<Vec<&str>, String> {
    exactly(text.split_whitespace().collect(), expected)
}

/// Parses `a`, or `{a, b}` if more than one is expected.
fn list(text: &str, expected: usize) -> Result<Vec<&str>, String> {
    let text = text.trim();
    let inner = if expected == 1 {
        text
    } else {
        text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).ok_or("a vector is in braces")?
    };
    exactly(inner.split(',').map(str::trim).collect(), expected)
}

fn exactly(items: Vec<&str>, expected: usize) -> Result<Vec<&str>, String> {
    if items.len() != expected || items.iter().any(|item| item.is_empty()) {
        return Err(format!("{expected} operands are needed"));
    }
    Ok(items)
}

fn bracketed(text: &str) -> Result<&str, String> {
    text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).ok_or("an address is in brackets".into())
}

/// Parses `3`, `r` or `r+s+1`, each with or without `@tag`.
fn expression(text: &str) -> Result<Expression, String> {
    let (sum, tag) = match text.split_once('@') {
        Some((sum, tag)) => (sum, Some(number(tag)?)),
        None => (text, None),
    };
    let mut result = Expression { constant: 0, registers: Vec::new(), tag };
    for term in sum.split('+').map(str::trim) {
        match number(term) {
            Ok(value) => result.constant += value,
            Err(_) if term.starts_with(|c: char| c.is_ascii_alphabetic()) => {
                result.registers.push(term.into())
            }
            Err(error) => return Err(error),
        }
    }
    Ok(result)
}

fn number(text: &str) -> Result<i64, String> {
    text.trim().parse().map_err(|_| format!("{text} is not a number"))
}

fn pattern(text: &str) -> Result<Pattern, String> {
    let (data, tag) = match text.trim().split_once('@') {
        Some((data, tag)) => (data, Some(number(tag)?)),
        None => (text.trim(), None),
    };
    let data = if data == "*" { None } else { Some(number(data)?) };
    Ok(Pattern { data, tag })
}

fn condition(text: &str) -> Result<Condition, String> {
    text.split('|').map(|all| all.split('&').map(atom).collect()).collect()
}

/// Parses `thread.register == 1` or `[x] != 10@2`.
fn atom(text: &str) -> Result<Atom, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [place, operator, value] = words[..] else { return Err("<place> == <value>".into()) };
    let equal = match operator {
        "==" => true,
        "!=" => false,
        _ => return Err(format!("{operator} is not == or !=")),
    };
    let place = match place.split_once('.') {
        Some((thread, register)) => Place::Register { thread: thread.into(), register: register.into() },
        None => Place::Memory(bracketed(place)?.into()),
    };
    Ok(Atom { place, equal, pattern: pattern(value)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
        litmus example   # a comment
        init [slot] = 5@0
        outcome b.r != 1 | b.s == *@2 & [x] == 7
        rank on gpu 0
          cta
            thread a
              st.weak [x], 1
              flag: st.release.sys [f], 1
        rank on gpu 1
          cta
            thread b
              ld.acquire.sys w, [f] until 1
              bar.sync
              ld.relaxed.sys.v2 {r, s}, [x slot] until {1, *@2}
              st.relaxed.gpu.v2 [p q], {r+s+3@4, 10@4}
        expect outcome never, race sometimes
        variant weaker
          flag: fence.acq_rel.gpu; st.relaxed.gpu [f], 1
          all on one gpu
          expect hang never";

    #[test]
    fn a_program_and_its_variant() {
        let cases = cases(TEXT).unwrap();
        let [base, variant] = &cases[..] else { panic!("two cases") };
        assert_eq!(base.program.gpus, [0, 1]);
        assert_eq!(base.program.initial, [("slot".to_string(), Value { data: 5, tag: Some(0) })]);
        assert_eq!(base.program.outcome.len(), 2);
        assert_eq!(base.program.outcome[1].len(), 2);
        assert_eq!(base.expect, [(Question::Outcome, false), (Question::Race, true)]);
        let b = &base.program.threads[1];
        assert_eq!((b.name.as_str(), b.rank, b.cta, b.body.len()), ("b", 1, 1, 4));
        assert!(b.body[0].1.polls() && !b.body[1].1.polls());
        let Instruction::Store(Strength::Relaxed(Scope::Gpu), stores) = &b.body[3].1 else { panic!() };
        let sum = Expression { constant: 3, registers: vec!["r".into(), "s".into()], tag: Some(4) };
        assert_eq!(stores[0], Store { location: "p".into(), alias: false, value: sum });

        assert_eq!(variant.program.name, "example, weaker");
        assert_eq!(variant.program.gpus, [0, 0]);
        assert_eq!(variant.expect, [(Question::Hang, false)]);
        let weaker = &variant.program.threads[0].body;
        assert_eq!(weaker.len(), 3);
        assert_eq!(weaker[1].1, Instruction::Fence { sc: false, scope: Scope::Gpu });
    }

    #[test]
    fn patterns() {
        let word = Value { data: 10, tag: Some(1) };
        for (text, matches) in [("10", true), ("10@1", true), ("*@1", true), ("*@2", false), ("9@1", false)] {
            assert_eq!(pattern(text).unwrap().matches(word), matches, "{text}");
        }
        assert!(!pattern("*@1").unwrap().matches(Value { data: 10, tag: None }));
    }

    #[test]
    fn errors_name_the_line() {
        let head = "litmus x\nrank on gpu 0\ncta\nthread t\n";
        for (text, message) in [
            ("", "no program"),
            ("st.weak [x], 1", "line 1: the first line must be"),
            ("litmus x\nrank on gpu 0\ncta\nst.weak [x], 1", "line 4: an instruction needs a thread"),
            (&format!("{head}ld.release.sys r, [x]"), "line 5: qualifiers are weak"),
            (&format!("{head}st.relaxed.warp [x], 1"), "line 5: warp is not a scope"),
            (&format!("{head}st.weak.v2 [x y], {{1}}"), "line 5: 2 operands are needed"),
            (&format!("{head}mov r, 1"), "line 5: mov is not known"),
            (&format!("{head}expect outcome maybe"), "line 5: maybe is not never or sometimes"),
            (&format!("{head}nop"), "x: expects nothing"),
            (&format!("{head}variant v\nno: removed"), "line 6: no instruction is labelled no"),
        ] {
            let error = cases(text).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
