//! `unirdma control`: the centre itself.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use rustix::event::{PollFd, PollFlags, poll};
use unirdma_fleet::v1;

use super::call::{self, Config};
use super::{Centre, show};
use crate::print;

/// Commands about the centre itself.
#[derive(Subcommand)]
pub enum ControlCommand {
    /// Make the directory of a new fleet: its authority, its store, and the token of its first administrator
    #[command(
        after_help = "Example:\n  unirdma control init /var/lib/unirdma-control\n  unirdma control run /var/lib/unirdma-control &\n  unirdma token create --role join --host h1"
    )]
    Init {
        /// The directory
        dir: PathBuf,
        /// A file for the store, or etcd://HOST:PORT[,HOST:PORT...][/PREFIX] for several centres; how to log in to etcd
        /// is in the file etcd.toml of the directory [default: fleet.redb in the directory]
        #[arg(long, value_name = "STORE")]
        store: Option<String>,
        /// Where the centre will be reached, for this user's configuration; several centres with commas between them
        #[arg(long, value_name = "URL[,URL...]", default_value = "https://127.0.0.1:7443")]
        url: String,
    },
    /// Be the centre until interrupted
    #[command(
        after_help = "Examples:\n  unirdma control run /var/lib/unirdma-control --listen 0.0.0.0:7443 --name centre.example.org\n  unirdma control run /var/lib/unirdma-control --store etcd://10.0.0.5:2379,10.0.0.6:2379 --name c1.example.org\n  unirdma control run /var/lib/unirdma-control --metrics 127.0.0.1:9752    metrics for Prometheus at http://127.0.0.1:9752/metrics\n\nWith etcd several centres serve at once, each with a copy of the directory. One makes the changes; if it dies another one does within 5 s."
    )]
    Run {
        /// The directory that `control init` made
        dir: PathBuf,
        /// Where hosts and administrators reach it
        #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:7443")]
        listen: SocketAddr,
        /// The store that `control init` was given [default: fleet.redb in the directory]
        #[arg(long, value_name = "STORE")]
        store: Option<String>,
        /// A name by which it is reached, beside this machine's name and addresses; may be given more than once. Other
        /// centres use the first one, or else the address that it listens at or this machine's name
        #[arg(long, value_name = "NAME")]
        name: Vec<String>,
        /// Without TLS, on loopback only
        #[arg(long)]
        plain: bool,
        /// Serve metrics for Prometheus at http://ADDR:PORT/metrics. Anyone who can connect can read how many objects
        /// there are and how often they change
        #[arg(long, value_name = "ADDR:PORT")]
        metrics: Option<SocketAddr>,
    },
    /// Copy a fleet to another store: from a file to etcd, so that it can have several centres, or back
    #[command(
        after_help = "Examples:\n  unirdma control copy /var/lib/unirdma-control --to etcd://10.0.0.5:2379,10.0.0.6:2379\n  unirdma control copy /var/lib/unirdma-control --from etcd://10.0.0.5:2379 --to /var/lib/unirdma-control/new.redb\n\nEnd the centre before, and start it afterwards with --store and the new store. Hosts go on meanwhile, and notice nothing. The old store\nstays as it is, so that you can go back. No centre may run on it while one runs on the new store."
    )]
    Copy {
        /// The directory that `control init` made
        dir: PathBuf,
        /// The store that the fleet has [default: fleet.redb in the directory]
        #[arg(long, value_name = "STORE")]
        from: Option<String>,
        /// The store that it is to have, in which there is no fleet yet: a file, or
        /// etcd://HOST:PORT[,HOST:PORT...][/PREFIX]
        #[arg(long, value_name = "STORE")]
        to: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the centre in figures
    Status {
        #[command(flatten)]
        centre: Centre,
    },
}

/// Runs a command. Returns the exit code.
pub(super) fn run(command: ControlCommand) -> io::Result<u8> {
    match command {
        ControlCommand::Init { dir, store, url } => init(&dir, store.as_deref(), url)?,
        ControlCommand::Copy { dir, from, to, json } => copy(&dir, from.as_deref(), &to, json)?,
        ControlCommand::Run { dir, listen, store, name, plain, metrics } => {
            crate::host::log_to_stderr();
            let options = unirdma_control::Options { dir, listen, store, plain, names: name, metrics };
            // Before there are threads, which would get the signals otherwise.
            let stop = crate::host::termination()?;
            tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(&options, stop))?;
        }
        ControlCommand::Status { centre } => {
            let status = call::again(&centre, async |mut c| Ok(c.status(v1::StatusRequest {}).await?.into_inner()))?;
            show::status(&status, centre.json)?;
        }
    }
    Ok(0)
}

fn init(dir: &Path, store: Option<&str>, url: String) -> io::Result<()> {
    let token = call::runtime()?.block_on(unirdma_control::init(dir, store))?;
    println!("The fleet's directory is {}; keep its files from others: whoever has them is the centre.", dir.display());
    println!("The token of its administrator, which is not shown again: {token}");
    let authority = std::fs::read_to_string(dir.join("authority.pem"))?;
    let text = toml::to_string(&Config { url, token, authority }).map_err(io::Error::other)?;
    let Some(path) = call::config_path() else { return Ok(()) };
    if path.exists() {
        println!(
            "{} names another centre and stays as it is; use --centre, --authority and UNIRDMA_TOKEN.",
            path.display()
        );
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    unirdma_control::write_private(&path, &text)?;
    println!("{} has it for this user's commands.", path.display());
    Ok(())
}

fn copy(dir: &Path, from: Option<&str>, to: &str, json: bool) -> io::Result<()> {
    let runtime = call::runtime()?;
    let copied = print::while_waiting("copying", || runtime.block_on(unirdma_control::copy(dir, from, to)))?;
    let unirdma_control::Copied { from, to, revision, records } = &copied;
    show::json_or(
        &serde_json::json!({ "from": from, "to": to, "revision": revision, "records": records }),
        json,
        || {
            format!(
                "{records} records at revision {revision} were copied from {from} to {to}.\nStart the centre with `--store {to}`, and none on \
             {from} any more."
            )
        },
    )
}

async fn serve(options: &unirdma_control::Options, stop: OwnedFd) -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    // There is a connection for each host. If the kernel refuses the limit, connections fail later.
    let most = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
    let (say, stopped) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut ready = [PollFd::new(&stop, PollFlags::IN)];
        while poll(&mut ready, None).is_err() {}
        crate::host::log_signal(stop.as_fd());
        let _ = say.send(());
    })?;
    let listening = unirdma_control::listen(options).await?;
    println!("unirdma control: serves at {}", listening.url);
    if let Some(at) = listening.metrics {
        println!("unirdma control: metrics at http://{at}/metrics");
    }
    sd_notify::notify(&[sd_notify::NotifyState::Ready])?;
    let leave = listening.leave();
    let ended = tokio::select! {
        ended = listening.serve() => ended,
        _ = stopped => Ok(()),
    };
    leave.await;
    ended
}
