//! Imports between modules go one way: between the layers of a crate's root, and between the files of a folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Folders of crate roots whose modules are checked.
const ROOTS: [&str; 2] = ["src", "cli/src"];

/// For each module: the modules that it imports, with the file that does so.
type Imports = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn modules_import_in_one_direction() {
    for root in ROOTS {
        let mut imports = Imports::new();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(root);
        read(&folder, &[], &reexports(&folder), &mut imports);
        assert!(imports.len() > 10, "only {:?} in {root}", imports.keys());
        let left = circles(imports);
        assert!(left.is_empty(), "circles of imports in {root}: {left:#?}");
    }
}

/// docs/architecture.md names every module in a layer; a module imports from its own layer and earlier ones only.
#[test]
fn layers_are_those_of_the_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let layers = layers(&document);
    let mut imports = Imports::new();
    read(&root.join("src"), &[], &reexports(&root.join("src")), &mut imports);
    let missing: Vec<_> = imports.keys().filter(|module| !layers.contains_key(*module)).collect();
    assert!(missing.is_empty(), "the document says nothing of {missing:?}");
    let found = upward(&imports, &layers);
    assert!(found.is_empty(), "imports of later layers: {found:#?}");
}

#[test]
fn an_import_of_a_later_layer_is_found() {
    let layers = layers("Imports point one way: `a`; `b`,\n`c`. More.");
    assert_eq!(layers, [("a", 0), ("b", 1), ("c", 1)].map(|(name, layer)| (name.to_owned(), layer)).into());
    let of = |module: &str, imported: &str| -> Imports {
        [(module.to_owned(), [(imported.to_owned(), String::new())].into())].into()
    };
    assert!(upward(&of("b", "c"), &layers).is_empty());
    assert!(upward(&of("c", "a"), &layers).is_empty());
    assert_eq!(upward(&of("a", "c"), &layers), ["a imports c in "]);
}

/// Returns the layer of each module in a document's sentence on imports, from the lowest.
fn layers(document: &str) -> BTreeMap<String, usize> {
    let (_, rest) = document.split_once("Imports point one way:").unwrap();
    let sentence = rest.split('.').next().unwrap();
    let names =
        |(layer, names): (usize, &str)| words(names).map(|name| (name.to_owned(), layer)).collect::<Vec<_>>();
    sentence.split(';').enumerate().flat_map(names).collect()
}

fn upward(imports: &Imports, layers: &BTreeMap<String, usize>) -> Vec<String> {
    let mut found = Vec::new();
    for (module, imported) in imports {
        let later = imported.iter().filter(|(other, _)| layers.get(*other) > layers.get(module));
        found.extend(later.map(|(other, file)| format!("{module} imports {other} in {file}")));
    }
    found
}

/// docs/architecture.md says how much code of each part is `unsafe`: who adds some changes the table, or lets
/// `FAST_ALLREDUCE_UNSAFE=write` do so. Code of tests counts as well if it is in the same folder.
#[test]
fn unsafe_code_is_that_of_the_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut rows = BTreeMap::new();
    for entry in std::fs::read_dir(root.join("src")).unwrap().map(|entry| entry.unwrap().path()) {
        rows.insert(format!("src/{}", entry.file_name().unwrap().to_str().unwrap()), unsafe_below(&entry));
    }
    for folder in ["capi/src", "python/src", "cli/src", "adapters/candle/src"] {
        rows.insert(folder.to_owned(), unsafe_below(&root.join(folder)));
    }
    rows.retain(|_, count| *count > 0);
    let total: usize = rows.values().sum();
    assert!(total > 100 && rows.len() > 10, "only {rows:?}");
    let mut table = "| part | `unsafe` |\n|---|---|\n".to_owned();
    for (part, count) in &rows {
        table += &format!("| `{part}` | {count} |\n");
    }
    table += &format!("| sum | {total} |\n");
    let path = root.join("docs/architecture.md");
    let document = std::fs::read_to_string(&path).unwrap();
    if std::env::var("FAST_ALLREDUCE_UNSAFE").is_ok_and(|value| value == "write") {
        let (before, rest) = document.split_once("| part | `unsafe` |\n").unwrap();
        let (_, after) = rest.split_once("\n\n").unwrap();
        std::fs::write(path, format!("{before}{table}\n{after}")).unwrap();
    } else {
        assert!(document.contains(&table), "docs/architecture.md must have this table:\n{table}");
    }
}

#[test]
fn unsafe_code_is_counted() {
    let code = "// unsafe { no }\nunsafe fn a() {}\nunsafe impl X for Y {} // unsafe { no }\n\
                let x = unsafe { b() } + unsafe { c() };\nlet not_unsafe = 1;\npub unsafe extern \"C\" fn d() {}\n";
    assert_eq!(unsafe_in(code), 5);
}

/// Counts the blocks, functions and implementations that are `unsafe` in the Rust files of a folder, or in one file.
fn unsafe_below(path: &Path) -> usize {
    if path.is_dir() {
        std::fs::read_dir(path).unwrap().map(|entry| unsafe_below(&entry.unwrap().path())).sum()
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        unsafe_in(&std::fs::read_to_string(path).unwrap())
    } else {
        0
    }
}

fn unsafe_in(code: &str) -> usize {
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    let forms = ["unsafe {", "unsafe fn ", "unsafe impl", "unsafe extern "];
    lines.map(|line| forms.iter().map(|form| line.matches(form).count()).sum::<usize>()).sum()
}

#[test]
fn files_of_a_folder_import_in_one_direction() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut circular = BTreeMap::new();
    let mut seen = 0;
    for crate_root in ["src", "cli/src", "capi/src", "python/src"] {
        folders(&root.join(crate_root), &mut |folder, path| {
            seen += 1;
            let left = circles(folder_imports(folder, path));
            if !left.is_empty() {
                circular.insert(folder.strip_prefix(root).unwrap().display().to_string(), left);
            }
        });
    }
    assert!(seen > 20, "only {seen} folders");
    assert!(circular.is_empty(), "circles of imports inside folders: {circular:#?}");
}

#[test]
fn imports_inside_a_folder_are_found() {
    let code = "use super::a::X;\nuse super::{b::Y, Type};\nuse super::super::no;\n\
                use crate::room::c::Z;\nuse crate::no;\n";
    let expected = ["a", "b", "Type", "c"].map(str::to_owned);
    assert_eq!(imported_in_folder(code, "crate::room::", 1), expected.into());
    assert_eq!(
        imported_in_folder("use super::super::a::X;\nuse super::own::Y;\n", "crate::room::", 2),
        ["a".to_owned()].into()
    );
}

/// Calls `visit` for every folder of modules, with the folder's module path.
fn folders(folder: &Path, visit: &mut dyn FnMut(&Path, &[String])) {
    fn below(folder: &Path, path: &[String], visit: &mut dyn FnMut(&Path, &[String])) {
        visit(folder, path);
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = entry.file_stem().unwrap().to_str().unwrap().to_owned();
            if entry.is_dir() && name != "tests" {
                below(&entry, &[path, &[name]].concat(), visit);
            }
        }
    }
    below(folder, &[], visit);
}

/// Returns for each file or subfolder of a folder which of the others it imports. `mod` stands for the items of the
/// folder's own file.
fn folder_imports(folder: &Path, path: &[String]) -> Imports {
    let own = ["mod.rs", "lib.rs", "main.rs"].map(|file| std::fs::read_to_string(folder.join(file)));
    let own = own.into_iter().find_map(Result::ok).unwrap_or_default();
    let mut names = BTreeMap::new();
    let mut imports = Imports::new();
    // Re-exports are not dependencies of the folder's own items.
    let mut needs = String::new();
    for item in own.split_inclusive(';') {
        match item
            .split_once("use self::")
            .filter(|(before, _)| before.lines().last().is_some_and(|line| line.starts_with("pub")))
        {
            Some((_, exported)) => {
                let mut words = words(exported).map(str::to_owned);
                let module = words.next().unwrap();
                names.extend(words.map(|name| (name, module.clone())));
            }
            None => needs += item,
        }
    }
    let prefix = path.iter().fold("crate::".to_owned(), |prefix, module| prefix + module + "::");
    let mut code: Vec<(String, String, usize)> =
        vec![("mod".into(), needs.replace("self::", &prefix), usize::MAX)];
    fn read_all(folder: &Path, key: Option<&str>, depth: usize, code: &mut Vec<(String, String, usize)>) {
        for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let is_root = depth == 1 && matches!(name, "mod" | "lib" | "main");
            if name == "tests" || is_root {
                continue;
            }
            let key = key.unwrap_or(name);
            if file.is_dir() {
                read_all(&file, Some(key), depth + 1, code);
            } else if file.extension().is_some_and(|extension| extension == "rs") {
                let depth = if name == "mod" { depth - 1 } else { depth };
                code.push((key.to_owned(), std::fs::read_to_string(&file).unwrap(), depth));
            }
        }
    }
    read_all(folder, None, 1, &mut code);
    let modules: BTreeSet<_> = code.iter().map(|(key, ..)| key.clone()).collect();
    for (key, text, depth) in code {
        let own = imports.entry(key.clone()).or_default();
        for name in imported_in_folder(&text, &prefix, depth) {
            let module =
                if modules.contains(&name) { &name } else { names.get(&name).map_or("mod", |module| module) };
            if *module != key {
                own.insert(module.to_owned(), name);
            }
        }
    }
    imports
}

/// Returns the first names of paths into a folder, in a file that reaches the folder by `super` repeated `depth` times.
fn imported_in_folder(code: &str, prefix: &str, depth: usize) -> BTreeSet<String> {
    let code = code.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    let code = lines.collect::<Vec<_>>().join("\n").replace(prefix, "room::");
    // More repetitions of `super` lead out of the folder, fewer stay below it.
    let from_folder = "super::".repeat(depth.min(8));
    let code = code.replace(&(from_folder.clone() + "super::"), "out::").replace(&from_folder, "room::");
    let paths = code.split("room::").skip(1);
    let names = paths.flat_map(|path| if path.starts_with('{') { branches(path) } else { first_word(path) });
    names.filter(|name| !matches!(name.as_str(), "self" | "super")).collect()
}

#[test]
fn a_circle_is_found() {
    let to = |modules: &[&str]| modules.iter().map(|module| ((*module).to_owned(), String::new())).collect();
    let line = [("a", to(&["b", "c"])), ("b", to(&["c"])), ("c", to(&[]))];
    let line: Imports = line.map(|(module, imported)| (module.to_owned(), imported)).into();
    let mut circle = line.clone();
    circle.insert("c".to_owned(), to(&["b"]));
    assert!(circles(line).is_empty());
    assert!(circles(circle).into_keys().eq(["b", "c"]));
}

#[test]
fn imports_of_all_forms_are_found() {
    let code = "use crate::a::X;\nuse crate::{b::Y, c::{V, W}, d}; // crate::no\n\
                use super::super::e;\nuse super::no::Z;\n\
                fn f() { crate::g::h(); }\n#[cfg(test)]\nmod tests {\n    use crate::no;\n}\n";
    let expected = ["a", "b", "c", "d", "e", "g"].map(str::to_owned);
    assert_eq!(imported(code, 2), expected.into());
}

/// Removes modules that import no remaining module, or that no remaining module imports, until none can be removed.
/// Circles remain.
fn circles(mut imports: Imports) -> Imports {
    loop {
        let before = imports.len();
        let modules: BTreeSet<_> = imports.keys().cloned().collect();
        imports.values_mut().for_each(|imported| imported.retain(|module, _| modules.contains(module)));
        let imported: BTreeSet<_> = imports.values().flat_map(|imported| imported.keys().cloned()).collect();
        imports.retain(|module, own| imported.contains(module) && !own.is_empty());
        if imports.len() == before {
            return imports;
        }
    }
}

/// Reads a folder's files, which are modules below `path`, and adds their imports. `names` maps the root's re-exports
/// to their modules.
fn read(folder: &Path, path: &[String], names: &BTreeMap<String, String>, imports: &mut Imports) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let own_path = match name.as_str() {
            "tests" | "lib" | "main" => continue,
            "mod" => path.to_vec(),
            _ => [path, &[name]].concat(),
        };
        if file.is_dir() {
            read(&file, &own_path, names, imports);
        } else if file.extension().is_some_and(|extension| extension == "rs") {
            let modules = imports.entry(own_path[0].clone()).or_default();
            for name in imported(&std::fs::read_to_string(&file).unwrap(), own_path.len()) {
                let module = names.get(&name).unwrap_or(&name).clone();
                if module != own_path[0] {
                    modules.insert(module, file.display().to_string());
                }
            }
        }
    }
}

/// Reads `pub use module::Name` in the root: returns the module of each name.
fn reexports(folder: &Path) -> BTreeMap<String, String> {
    let root = ["lib.rs", "main.rs"].map(|file| std::fs::read_to_string(folder.join(file)));
    let root = root.into_iter().find_map(Result::ok).unwrap();
    let uses = root.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let named = uses.flat_map(|item| {
        let mut words = words(item).map(str::to_owned);
        let module = words.next().unwrap();
        words.map(move |name| (name, module.clone()))
    });
    named.collect()
}

/// Returns the first names of paths from the crate's root in the code of a module at `depth`, without its tests.
fn imported(code: &str, depth: usize) -> BTreeSet<String> {
    let code = code.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    let code = lines.collect::<Vec<_>>().join("\n").replace(&"super::".repeat(depth), "crate::");
    let paths = code.split("crate::").skip(1);
    paths.flat_map(|path| if path.starts_with('{') { branches(path) } else { first_word(path) }).collect()
}

fn first_word(path: &str) -> Vec<String> {
    words(path).next().map(str::to_owned).into_iter().collect()
}

/// Returns the first names of the paths in braces that `text` starts with.
fn branches(text: &str) -> Vec<String> {
    let mut depth = 0;
    let mut starts = Vec::new();
    for (at, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if depth == 1 && matches!(character, '{' | ',') {
            starts.push(at + 1);
        }
    }
    starts.into_iter().flat_map(|start| first_word(&text[start..])).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let parts = text.split(|character: char| !character.is_alphanumeric() && character != '_');
    parts.filter(|word| !word.is_empty())
}
