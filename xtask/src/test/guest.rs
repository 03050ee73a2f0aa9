//! The part `vm`: tests and labs on Debian's kernels, each in a virtual machine.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{
    Part,
    programs::{KERNEL_WIREGUARD, TestBinary, package_of},
    read_outcomes_of,
    reader::Reader,
};
use crate::{
    command::own_program,
    report::{Outcome, TestOutcome},
    rotation::{Kernel, OnKernel},
    second_try::SecondTries,
    vm, workspace_root,
};

/// A lab in a guest: prefix of its tests' names, and arguments of `lab test`.
type Lab = (&'static str, &'static [&'static str]);

/// Many machines' kernels have no VLAN devices; the name is that of the lab's mode.
const VLAN: Lab =
    ("private network in a VLAN: ", &["--checks=carried", "--topology=vlan", "--kg=--tunnel=ipip"]);

/// Labs that run on a kernel, few because emulated kernels are slow. Kernels before 6.3 decapsulate a
/// packet of the other family another way, so the oldest has the checks that exercise the kernel, and the
/// IPv6 underlay. Users' operations on kernel WireGuard are checked on the newer one.
const fn labs_on(kernel: Kernel) -> &'static [Lab] {
    match kernel {
        Kernel::Oldest => &[("", &["--checks=transport", "--modes=IPv6 underlay"])],
        Kernel::Tcx => &[("", &["--checks=wireguard"])],
        Kernel::Newest => &[VLAN],
    }
}

/// Modules that exercise nothing of the kernel that others do not: they run on this machine's kernel only.
const NOT_ON_OLDEST: [&str; 3] = ["bpf::map_sizes", "bpf::monitor", "bpf::trace"];
/// Modules for kernels newer than the oldest: their verifier, and the programs that demand most of it.
const ON_NEWER: [&str; 2] = ["bpf::load", "bpf::masquerade_both"];
/// What is measured with kernel WireGuard: three minutes, so on one kernel.
const MEASURED: &str = "net::claim_moves";
/// Further modules for the newest kernel: its hooks, and packets of all kinds, because it removes more of a
/// GSO packet's outer header than older kernels can.
const ON_NEWEST: [&str; 2] = ["bpf::agreement", "bpf::attach"];
/// Modules that need what many machines' kernels lack: VLAN and IPIP devices, or kernel WireGuard. They run
/// on every kernel, so that each run of the part has them somewhere.
const ON_ALL: [&str; 3] = ["bpf::links", "net::strangers", KERNEL_WIREGUARD];

fn is_wanted(kernel: Kernel, module: &str) -> bool {
    ON_ALL.contains(&module)
        || match kernel {
            Kernel::Oldest => module.starts_with("bpf::") && !NOT_ON_OLDEST.contains(&module),
            Kernel::Tcx => ON_NEWER.contains(&module) || module == MEASURED,
            Kernel::Newest => ON_NEWER.contains(&module) || ON_NEWEST.contains(&module),
        }
}

/// Runs the tests and labs of `what` on these kernels, each of which is booted once.
pub fn run(
    (kernels, what): (&[Kernel], OnKernel),
    binaries: &[TestBinary],
    tries: &mut SecondTries,
) -> Result<Vec<TestOutcome>> {
    let mut outcomes = Vec::new();
    for &kernel in kernels {
        outcomes.extend(tries.run(|names| boot(kernel, what, binaries, names))?);
    }
    Ok(outcomes)
}

/// Whether guests run this test, which this machine's kernel cannot run.
pub fn runs(skipped: &TestOutcome) -> bool {
    let module = skipped.name.rsplit_once("::").map_or("", |(module, _)| module);
    ON_ALL.contains(&module) || module == MEASURED || skipped.name.starts_with(VLAN.0)
}

/// Marks skipped tests that passed in a guest as run elsewhere, and prints where.
pub fn count_elsewhere(outcomes: &mut [TestOutcome]) {
    let in_guests: Vec<_> = outcomes
        .iter()
        .filter(|outcome| outcome.part == Part::Vm.label() && outcome.outcome == Outcome::Passed)
        .filter_map(|outcome| outcome.name.split_once(": "))
        .map(|(kernel, name)| (kernel.to_owned(), name.to_owned()))
        .collect();
    for outcome in outcomes.iter_mut() {
        let is_it = |(_, name): &&(String, String)| *name == outcome.name;
        if outcome.outcome == Outcome::Skipped
            && outcome.part != Part::Vm.label()
            && let Some((kernel, name)) = in_guests.iter().find(is_it)
        {
            println!("skipped on this kernel, passed on {kernel}: {name}");
            outcome.outcome = Outcome::Elsewhere;
        }
    }
}

/// Boots the kernel and runs the tests and then the labs of these names, or all when there are none.
/// Whatever the guest does not reach has failed.
fn boot(
    kernel: Kernel,
    what: OnKernel,
    binaries: &[TestBinary],
    names: &[String],
) -> Result<Vec<TestOutcome>> {
    let shared = workspace_root().join(vm::SHARED).join("guest");
    let _ = fs::remove_dir_all(&shared);
    fs::create_dir_all(&shared).with_context(|| shared.display().to_string())?;
    let prefix = format!("{}: ", kernel.label());
    let modules = modules((kernel, what), binaries, names)?;
    let labs = labs_on(kernel).iter().filter(|lab| what.has_labs() && is_of(lab, &prefix, names));
    let labs: Vec<_> = labs.map(|lab| LabRun::new(lab, &prefix, &shared)).collect();
    let mut script = STAMP.to_owned();
    script.extend(modules.iter().map(|module| module.line(&shared)));
    for lab in &labs {
        script += &lab.line()?;
    }
    let timeout = u64::from(!modules.is_empty()) * 1800 + labs.len() as u64 * 1500;
    let ran = vm::execute(&vm::VmArgs {
        kernel: kernel.label().to_owned(),
        modules: None,
        memory: 3072,
        timeout,
        icount: false,
        command: vec!["bash".to_owned(), "-c".to_owned(), script],
    });
    if let Err(error) = ran {
        println!("vm: {error:#}");
    }
    let mut outcomes: Vec<_> = modules.iter().flat_map(|module| module.outcomes(&shared)).collect();
    outcomes.iter_mut().for_each(|outcome| outcome.name.insert_str(0, &prefix));
    outcomes.extend(labs.iter().flat_map(LabRun::outcomes));
    Ok(outcomes)
}

/// A shell function that prefixes each line with the time since boot.
const STAMP: &str = "stamp() { while IFS= read -r line; do read -r up idle < /proc/uptime; \
                     printf '%s %s\\n' \"$up\" \"$line\"; done; }\n";

/// A test module, which runs in a process of its own.
struct Module<'a> {
    binary: &'a TestBinary,
    name: String,
    /// Arguments that choose its tests.
    filter: String,
}

fn modules<'a>(
    (kernel, what): (Kernel, OnKernel),
    binaries: &'a [TestBinary],
    names: &[String],
) -> Result<Vec<Module<'a>>> {
    let prefix = format!("{}: ", kernel.label());
    let mut chosen = Vec::new();
    for binary in binaries.iter().filter(|binary| matches!(binary.part(), Part::Bpf | Part::Net)) {
        let is_chosen = |module: &String| is_wanted(kernel, module) && what.has_tests(module);
        for name in binary.modules()?.into_iter().filter(is_chosen) {
            let filter = filter(&binary.target, &name, &prefix, names);
            chosen.extend(filter.map(|filter| Module { binary, name, filter }));
        }
    }
    Ok(chosen)
}

impl Module<'_> {
    /// Shell line that runs it: the output goes to the console and, with the time since boot, to a file
    /// that is read afterwards.
    fn line(&self, shared: &Path) -> String {
        format!(
            "echo '== {name}'; cd {}; {{ echo; {} --test-threads=1 --nocapture {} 2>&1; \
             printf '\\nended %s\\n' $?; }} | stamp | tee {} | cut -d' ' -f2-\n",
            workspace_root().join(package_of(self.binary)).display(),
            self.binary.path.display(),
            self.filter,
            shared.join(&self.name).display(),
            name = self.name,
        )
    }

    fn outcomes(&self, shared: &Path) -> Vec<TestOutcome> {
        let log = fs::read_to_string(shared.join(&self.name)).unwrap_or_default();
        read_log(&self.binary.target, &self.name, &log)
    }
}

/// Arguments that select the module's tests from names with the prefix, or all when there are no names;
/// `None` when none of the names is in the module.
fn filter(target: &str, module: &str, prefix: &str, names: &[String]) -> Option<String> {
    let whole =
        || module.strip_prefix(target).and_then(|rest| rest.strip_prefix("::")).map(|it| format!("{it}::"));
    let own: Vec<_> = names
        .iter()
        .filter_map(|name| name.strip_prefix(prefix))
        .filter_map(|name| Some((name, name.strip_prefix(module)?)))
        .collect();
    // A module that did not end properly runs as a whole.
    if names.is_empty() || own.iter().any(|(_, rest)| rest.starts_with(' ')) {
        return whole();
    }
    let tests = own.iter().filter(|(_, rest)| rest.starts_with("::"));
    let tests: Vec<_> = tests.filter_map(|(name, _)| name.strip_prefix(target)?.strip_prefix("::")).collect();
    (!tests.is_empty()).then(|| format!("--exact {}", tests.join(" ")))
}

/// Reads lines prefixed with seconds, of which the first marks the start.
fn read_log(target: &str, module: &str, log: &str) -> Vec<TestOutcome> {
    let mut reader = Reader::new(Part::Vm.label(), target);
    let (mut start, mut code) = (None, None);
    for line in log.lines() {
        let (time, line) = line.split_once(' ').unwrap_or((line, ""));
        let time = time.parse::<f64>().unwrap_or_default();
        let at = time - *start.get_or_insert(time);
        match line.strip_prefix("ended ") {
            Some(status) => code = Some(status.to_owned()),
            None => drop(reader.line(line, at)),
        }
    }
    let how =
        code.as_ref().map_or("the guest ended before it".to_owned(), |code| format!("exit code {code}"));
    reader.end(code.as_deref() == Some("0"), module, &how)
}

/// Whether one of these names belongs to the lab, or there are none. Names of tests begin with their
/// program's.
fn is_of(lab: &Lab, prefix: &str, names: &[String]) -> bool {
    let own = |name: &String| {
        let name = name.strip_prefix(prefix)?;
        let is_test = ["bpf::", "net::"].iter().any(|program| name.starts_with(program));
        (!is_test && name.starts_with(lab.0)).then_some(())
    };
    names.is_empty() || names.iter().any(|name| own(name).is_some())
}

/// A lab in the guest.
struct LabRun {
    arguments: &'static [&'static str],
    /// Prefix of its outcomes' names.
    prefix: String,
    outcomes: PathBuf,
    code: PathBuf,
}

impl LabRun {
    fn new((name, arguments): &'static Lab, prefix: &str, shared: &Path) -> Self {
        let file = |end: &str| shared.join(format!("lab {name}{end}").replace([' ', ':'], "-"));
        Self {
            arguments,
            prefix: format!("{prefix}{name}"),
            outcomes: file("outcomes.json"),
            code: file("code"),
        }
    }

    fn line(&self) -> Result<String> {
        let this = own_program()?;
        let bin = this.parent().context("no directory")?;
        let fixed: [&OsStr; 11] = [
            this.as_os_str(),
            "lab".as_ref(),
            "test".as_ref(),
            "--bin".as_ref(),
            bin.as_os_str(),
            "--wireguard".as_ref(),
            "kernel".as_ref(),
            "--prefix".as_ref(),
            self.prefix.as_ref(),
            "--json".as_ref(),
            self.outcomes.as_os_str(),
        ];
        let words = fixed.into_iter().chain(self.arguments.iter().map(OsStr::new));
        let words: Vec<_> = words.map(|word| vm::quote(&word.to_string_lossy())).collect();
        Ok(format!(
            "echo '-- {}a lab with kernel WireGuard'; cd {}; {}; printf %s $? > {}\n",
            self.prefix,
            vm::quote(&workspace_root().to_string_lossy()),
            words.join(" "),
            vm::quote(&self.code.to_string_lossy()),
        ))
    }

    fn outcomes(&self) -> Vec<TestOutcome> {
        let code = fs::read_to_string(&self.code).ok();
        let mut outcomes = read_outcomes_of(&self.outcomes, Part::Vm).unwrap_or_default();
        let has_failed = outcomes.iter().any(TestOutcome::is_failed);
        if code.as_deref() != Some("0") && !has_failed {
            let how = code.map_or("the guest ended before it".to_owned(), |code| format!("exit code {code}"));
            println!("FAILED {}the lab does not end properly: {how}", self.prefix);
            let name = format!("{}the lab ends properly", self.prefix);
            outcomes.push(TestOutcome::new(Part::Vm.label(), &name, Outcome::Failed, 0.0));
        }
        outcomes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_kernel_skips_and_another_passes_is_counted_there() {
        let outcome = |part: &str, name: &str, outcome| TestOutcome::new(part, name, outcome, 0.0);
        let mut outcomes = [
            outcome("bpf", "bpf::links::vlan", Outcome::Skipped),
            outcome("lab", "private network in a VLAN: the mesh comes up", Outcome::Skipped),
            outcome("bpf", "bpf::links::other", Outcome::Skipped),
            outcome("vm", "6.1: bpf::links::vlan", Outcome::Passed),
            outcome("vm", "6.1: private network in a VLAN: the mesh comes up", Outcome::Passed),
            outcome("vm", "6.1: bpf::links::other", Outcome::Skipped),
        ];
        count_elsewhere(&mut outcomes);
        let said = outcomes.map(|outcome| outcome.outcome);
        assert_eq!(
            said,
            [
                Outcome::Elsewhere,
                Outcome::Elsewhere,
                Outcome::Skipped,
                Outcome::Passed,
                Outcome::Passed,
                Outcome::Skipped
            ]
        );
    }

    #[test]
    fn a_log_of_a_guest_that_stopped_is_a_failure() {
        let log = "10.00 \n10.50 running 2 tests\n12.00 test one ... ok\n";
        let stopped = read_log("bpf", "bpf::x", log);
        assert_eq!(stopped.len(), 2);
        assert_eq!((stopped[0].outcome, stopped[0].seconds), (Outcome::Passed, 2.0));
        assert_eq!((stopped[1].name.as_str(), stopped[1].outcome), ("bpf::x ends properly", Outcome::Failed));
        assert_eq!(read_log("bpf", "bpf::x", &format!("{log}13.00 ended 0\n")).len(), 1);
        assert_eq!(read_log("bpf", "bpf::x", "").len(), 1);
    }

    #[test]
    fn a_second_try_runs_what_failed() {
        let names = ["6.1: bpf::a::x", "6.1: bpf::b ends properly", "6.12: bpf::c::y", "6.1: bpf::ab::z"];
        let names = names.map(str::to_owned);
        let chosen = |module: &str, names: &[String]| filter("bpf", module, "6.1: ", names);
        assert_eq!(chosen("bpf::a", &names).as_deref(), Some("--exact a::x"));
        assert_eq!(chosen("bpf::b", &names).as_deref(), Some("b::"));
        assert_eq!(chosen("bpf::c", &names), None);
        assert_eq!(chosen("bpf::c", &[]).as_deref(), Some("c::"));
        let labs = |names: &[String]| [("", &[][..]), VLAN].map(|lab| is_of(&lab, "6.1: ", names));
        assert_eq!(labs(&names), [false; 2]);
        assert_eq!(labs(&[]), [true; 2]);
        let lab = "6.1: private network in a VLAN: the mesh comes up";
        assert_eq!(labs(&[names[0].clone(), lab.to_owned()]), [true; 2]);
        assert_eq!(labs(&["6.1: the mesh comes up".to_owned()]), [true, false]);
    }

    #[test]
    fn a_lab_that_the_guest_did_not_come_to_has_failed() {
        let shared = tempfile::tempdir().unwrap();
        let lab = LabRun::new(&VLAN, "6.1: ", shared.path());
        let name = "6.1: private network in a VLAN: the lab ends properly";
        let said = |lab: &LabRun| -> Vec<_> {
            lab.outcomes().into_iter().map(|outcome| (outcome.name, outcome.outcome)).collect()
        };
        assert_eq!(said(&lab), [(name.to_owned(), Outcome::Failed)]);
        let passed = TestOutcome::new("lab", "6.1: it", Outcome::Passed, 1.0);
        fs::write(&lab.outcomes, serde_json::to_vec(&[passed]).unwrap()).unwrap();
        fs::write(&lab.code, "0").unwrap();
        assert_eq!(said(&lab), [("6.1: it".to_owned(), Outcome::Passed)]);
        fs::write(&lab.code, "1").unwrap();
        assert_eq!(said(&lab).len(), 2, "a failure that no outcome shows");
        assert!(lab.line().unwrap().contains("'--checks=carried' '--topology=vlan'"));
    }
}
