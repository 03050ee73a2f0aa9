//! Build, lab and test commands of this repository: `cargo xtask --help`.

#![deny(clippy::disallowed_methods)]

mod apt;
mod bench;
mod build_ebpf;
mod cluster;
mod dist;
mod docs;
mod fuzz;
mod image;
mod kube_tools;
mod kubernetes;
mod manifests;
mod prometheus;
mod rotation;
mod second_try;
mod sim;
mod static_checks;
mod test;
mod vm;
mod web_tools;
mod wheels;

use std::process::{Command, ExitCode};

use kilo_lab::{self as lab, command, confine, report, takedown, workspace_root};

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser, Debug)]
#[command(name = "cargo xtask", about = "Build, lab and test commands of this repository")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand, Debug)]
enum Task {
    /// Build the BPF object (target/bpf/kilo.o), fetching what that needs.
    BuildEbpf {
        /// Build a second time in another directory and compare the bytes.
        #[arg(long)]
        check_reproducible: bool,
    },
    /// Run all tests, or the named parts.
    Test(test::TestArgs),
    /// Fuzz the code that reads packets and text from elsewhere, with libFuzzer.
    Fuzz(fuzz::FuzzArgs),
    /// Run a command in a QEMU guest with a Debian kernel.
    Vm(vm::VmArgs),
    /// Count what a packet costs, beside plain routes and Kilo's kernel IPIP.
    Bench(bench::BenchArgs),
    /// Run fault schedules over the failover modules, in simulated time.
    Sim(sim::SimArgs),
    /// Find or build etcd and kube-apiserver for the API tests.
    KubeAssets,
    /// Get helm and kubectl, which the tests of the manifests run.
    KubeTools,
    /// Get Chromium and axe-core, which the tests of the agent's page use.
    WebTools,
    /// Build the container image without a registry, as an OCI archive.
    Image(image::ImageArgs),
    /// Make the files of a release: image, kgctl, manifests, chart, checksums.
    Dist(dist::DistArgs),
    /// Make the site of docs/ (target/book) with mdBook, and check the licences of its crates.
    Docs,
    /// Write the generated files of manifests/.
    Manifests,
    /// Bring up a real Kubernetes with Kilo on it, on this machine.
    Cluster(cluster::ClusterArgs),
    /// Build everything and show a working mesh in network namespaces.
    Lab(lab::LabArgs),
    /// Become an agent with the rights of its DaemonSet, in the namespaces of its node.
    #[command(hide = true)]
    Confine(confine::ConfineArgs),
    /// Carry packets between two TUN devices.
    #[command(hide = true)]
    Wire(lab::point_to_point_link::WireArgs),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match Cli::parse().command {
        Task::BuildEbpf { check_reproducible: false } => build_ebpf::build(false).map(drop),
        Task::BuildEbpf { check_reproducible: true } => build_ebpf::check_reproducible(),
        Task::Test(args) => {
            let _guard = takedown::end_children_with_us("xtask")?;
            test::main(&args)
        }
        Task::Fuzz(args) => fuzz::main(&args),
        Task::Vm(args) => std::process::exit(vm::execute(&args)?),
        Task::Bench(args) => {
            if args.needs_build() {
                build_ebpf::build(false)?;
                build(&["--release", "--bin", "kg"])?;
            }
            bench::main(&args)
        }
        Task::Sim(args) => sim::main(&args),
        Task::KubeAssets => kubernetes::assets().map(drop),
        Task::KubeTools => kube_tools::prepare(),
        Task::WebTools => web_tools::prepare(),
        Task::Cluster(args) => {
            if args.needs_build() {
                build_all()?;
            }
            cluster::main(&args)
        }
        Task::Image(args) => {
            let _guard = takedown::end_children_with_us("image")?;
            image::main(&args)
        }
        Task::Dist(args) => {
            let _guard = takedown::end_children_with_us("dist")?;
            dist::main(&args)
        }
        Task::Docs => docs::build(),
        Task::Manifests => manifests::write(),
        Task::Lab(args) => {
            if args.stands_up() {
                apt::install(lab::PACKAGES)?;
            }
            if args.needs_build() {
                build_all()?;
            }
            lab::main(args)
        }
        Task::Confine(args) => confine::main(&args),
        Task::Wire(args) => lab::point_to_point_link::main(&args),
    }
}

/// Builds the BPF objects and the binaries.
fn build_all() -> Result<()> {
    build_ebpf::build(false)?;
    build_ebpf::build_foreign()?;
    build(&["--bins"])
}

fn build(what: &[&str]) -> Result<()> {
    println!("xtask: cargo build {}", what.join(" "));
    command::show(
        Command::new("cargo").current_dir(workspace_root()).args(["build", "--locked", "--quiet"]).args(what),
    )
}
