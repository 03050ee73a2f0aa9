//! Replaces commands that inspect or change the local kernel on systems other than Linux: each fails and says
//! where it works and what to do instead.

#![allow(clippy::unused_async, reason = "the commands they stand for are awaited")]

use anyhow::{Result, bail};
use clap::Args;

/// Whatever is given after the command: it is refused in any case.
#[derive(Args, Debug)]
pub struct Anything {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _rest: Vec<String>,
}

fn refuse(command: &str, instead: &str) -> Result<String> {
    bail!("`kgctl {command}` needs Linux, and this is kgctl for {}; {instead}", std::env::consts::OS)
}

/// `kgctl connect`
pub mod connect {
    pub use super::Anything as ConnectArgs;

    /// Always fails.
    pub async fn run(_: &ConnectArgs) -> super::Result<String> {
        super::refuse(
            "connect",
            "make a Peer object for this machine, print its configuration with `kgctl showconf peer NAME`, and \
             give that to the WireGuard app",
        )
    }
}

/// `kgctl monitor` without the name of a node: always fails.
pub async fn monitor<T>(_: &T) -> Result<()> {
    refuse("monitor", ON_A_NODE).map(drop)
}

/// `kgctl trace` without the name of a node: always fails.
pub async fn trace<T>(_: &T) -> Result<String> {
    refuse("trace", ON_A_NODE)
}

const ON_A_NODE: &str = "name the node to look into, which is done through the API server: `kgctl monitor NODE`, \
                         `kgctl trace NODE ...`";

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        connect: connect::ConnectArgs,
    }

    #[tokio::test]
    async fn each_says_that_it_needs_linux_and_what_to_do_instead() {
        let cli = Cli::try_parse_from(["connect", "--interface", "kilo0"]).unwrap();
        let said = trace(&()).await.unwrap_err().to_string();
        assert!(said.starts_with("`kgctl trace` needs Linux") && said.contains("NODE"), "{said}");
        let said = monitor(&()).await.unwrap_err().to_string();
        assert!(said.starts_with("`kgctl monitor` needs Linux") && said.contains("NODE"), "{said}");
        let said = connect::run(&cli.connect).await.unwrap_err().to_string();
        assert!(said.starts_with("`kgctl connect` needs Linux") && said.contains("showconf"), "{said}");
    }
}
