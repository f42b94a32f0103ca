//! Commands about a whole fleet: they call a control centre, or run one. Only these commands start an asynchronous
//! runtime.

mod call;
mod control;
mod declared;
mod show;

use std::io;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use unirdma_fleet::v1;

pub use control::ControlCommand;

/// Options of commands that call a centre.
#[derive(Args)]
pub struct Centre {
    /// The control centre, or several of a fleet with commas between them: the first one that can be reached is asked
    /// [default: as `unirdma control init` has written into the user's configuration]
    #[arg(long, value_name = "URL[,URL...]", env = "UNIRDMA_CENTRE")]
    centre: Option<String>,
    /// Certificate of its authority: `authority.pem` of its directory
    #[arg(long, value_name = "FILE", env = "UNIRDMA_AUTHORITY")]
    authority: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum KindArg {
    Host,
    Group,
    Vrnic,
    Rule,
}

impl KindArg {
    fn message(self) -> i32 {
        i32::from(match self {
            KindArg::Host => v1::Kind::Host,
            KindArg::Group => v1::Kind::Group,
            KindArg::Vrnic => v1::Kind::Vrnic,
            KindArg::Rule => v1::Kind::Rule,
        })
    }
}

/// Commands about a fleet.
#[derive(Subcommand)]
pub enum FleetCommand {
    /// Run the control centre of a fleet of hosts, or create one
    Control {
        #[command(subcommand)]
        command: ControlCommand,
    },
    /// Change the objects of a fleet to what files declare, all of them or none
    #[command(after_help = declared::EXAMPLES)]
    Apply {
        /// A file (TOML), a directory for its *.toml files, or - for standard input; may be given more than once
        #[arg(short, long, value_name = "FILE", required = true)]
        file: Vec<PathBuf>,
        /// Delete groups, vRNICs and rules that are not in the file; not hosts, nor what hosts made
        #[arg(long)]
        prune: bool,
        /// Only say what would change
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        centre: Centre,
    },
    /// Show what a file would change in a fleet; the exit code is 1 if it would change something
    #[command(after_help = "Example:\n  unirdma diff -f network.toml --prune")]
    Diff {
        /// A file (TOML), a directory for its *.toml files, or - for standard input; may be given more than once
        #[arg(short, long, value_name = "FILE", required = true)]
        file: Vec<PathBuf>,
        /// As `apply --prune` would
        #[arg(long)]
        prune: bool,
        #[command(flatten)]
        centre: Centre,
    },
    /// Show objects of a fleet
    #[command(
        after_help = "Examples:\n  unirdma get vrnic\n  unirdma get vrnic --group blue --json\n  unirdma get host h1"
    )]
    Get {
        /// Their kind
        kind: KindArg,
        /// Only the one with this name
        name: Option<String>,
        /// Only vRNICs of this group
        #[arg(long)]
        group: Option<String>,
        /// Only vRNICs on this host
        #[arg(long)]
        host: Option<String>,
        #[command(flatten)]
        centre: Centre,
    },
    /// Delete objects of a fleet
    #[command(
        after_help = "Examples:\n  unirdma delete vrnic a b\n  unirdma delete group blue --force    with its vRNICs and the rules that name it"
    )]
    Delete {
        /// Their kind
        kind: KindArg,
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
        /// Also with what depends on it, and vRNICs that programs use
        #[arg(long)]
        force: bool,
        /// Only say what would change
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        centre: Centre,
    },
    /// Show all objects of a fleet, and each change until interrupted
    #[command(
        after_help = "Example:\n  unirdma watch vrnic --json    a line of JSON for each piece of news\n\nWith one token up to 32 may watch at a time; administrators are not bound by that."
    )]
    Watch {
        /// Only of this kind
        kind: Option<KindArg>,
        /// Only vRNICs of this group
        #[arg(long)]
        group: Option<String>,
        #[command(flatten)]
        centre: Centre,
    },
    /// Make, list and revoke the tokens of a fleet
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Show who changed what in a fleet, newest first
    #[command(after_help = "Example:\n  unirdma audit --limit 20")]
    Audit {
        /// Most entries, 1,000 at most; fewer come if they are long
        #[arg(long, default_value_t = 100)]
        limit: u32,
        /// Only entries before this revision
        #[arg(long, default_value_t = 0, hide_default_value = true)]
        before: u64,
        #[command(flatten)]
        centre: Centre,
    },
}

/// Commands about tokens.
#[derive(Subcommand)]
pub enum TokenCommand {
    /// Make a token, and print it: it is not shown again
    #[command(
        after_help = "Examples:\n  unirdma token create --role join --host h1           host h1 may join by it, once\n  unirdma token create --role tenant --group blue --host h1 --expires 30d\n  unirdma token create dashboard --role reader"
    )]
    Create {
        /// Name of the token [default: token-1, ...]
        #[arg(default_value = "", hide_default_value = true)]
        name: String,
        /// Role of the token
        #[arg(long)]
        role: RoleArg,
        /// A group of the tenant; may be given more than once
        #[arg(long)]
        group: Vec<String>,
        /// Of a join token: the host that joins by it [default: any new host]. Of a tenant: a host on which it may put
        /// vRNICs, in addition to hosts that have vRNICs of its groups; may be given more than once; `*` is any host
        #[arg(long)]
        host: Vec<String>,
        /// Lifetime of the token: a number with m, h or d [default: unlimited]
        #[arg(long, value_name = "TIME", value_parser = crate::units::lifetime)]
        expires: Option<u64>,
        #[command(flatten)]
        centre: Centre,
    },
    /// List tokens, without their secrets
    Ls {
        #[command(flatten)]
        centre: Centre,
    },
    /// Revoke a token, and end what was begun with it
    Revoke {
        /// Name of the token
        name: String,
        #[command(flatten)]
        centre: Centre,
    },
}

/// Roles of tokens.
#[derive(Clone, Copy, ValueEnum)]
pub enum RoleArg {
    /// Changes everything
    Admin,
    /// Sees everything
    Reader,
    /// Changes vRNICs and rules of its groups, and sees nothing else
    Tenant,
    /// Lets one host join
    Join,
}

/// Commands about secrets.
#[derive(Subcommand)]
pub enum SecretCommand {
    /// Give a group another secret; the one before is taken until all hosts have the new one
    #[command(after_help = "Example:\n  unirdma secret rotate blue")]
    Rotate {
        /// Name of the group
        group: String,
        #[command(flatten)]
        centre: Centre,
    },
}

/// Runs a command. Returns the exit code.
///
/// # Errors
/// The centre refuses, or cannot be reached; one line says why.
pub fn run(command: FleetCommand) -> io::Result<u8> {
    match command {
        FleetCommand::Control { command } => control::run(command),
        FleetCommand::Apply { file, prune, dry_run, centre } => {
            let objects = declared::read(&file)?;
            let request = v1::ApplyRequest { objects, prune, dry_run };
            let done = call::again(&centre, async |mut c| Ok(c.apply(request.clone()).await?.into_inner()))?;
            show::applied(&done, dry_run, centre.json)?;
            Ok(0)
        }
        FleetCommand::Diff { file, prune, centre } => {
            let objects = declared::read(&file)?;
            let request = v1::ApplyRequest { objects, prune, dry_run: true };
            let done = call::again(&centre, async |mut c| Ok(c.apply(request.clone()).await?.into_inner()))?;
            show::difference(&done, centre.json)?;
            Ok(u8::from(!done.changes.is_empty()))
        }
        FleetCommand::Get { kind, name, group, host, centre } => {
            let request = v1::GetRequest {
                kind: kind.message(),
                name: name.unwrap_or_default(),
                group: group.unwrap_or_default(),
                host: host.unwrap_or_default(),
                ..v1::GetRequest::default()
            };
            let found = call::pages(&centre, request)?;
            show::objects(kind, &found, centre.json)?;
            Ok(0)
        }
        FleetCommand::Delete { kind, names, force, dry_run, centre } => {
            let names = names.into_iter().map(|name| v1::Name { kind: kind.message(), name }).collect();
            let request = v1::DeleteRequest { names, force, dry_run };
            let done = call::once(&centre, async |mut c| Ok(c.delete(request).await?.into_inner()))?;
            show::applied(&done, dry_run, centre.json)?;
            Ok(0)
        }
        FleetCommand::Watch { kind, group, centre } => {
            let kind = kind.map_or(i32::from(v1::Kind::Any), KindArg::message);
            call::watch(&centre, v1::WatchRequest { kind, group: group.unwrap_or_default() })?;
            Ok(0)
        }
        FleetCommand::Token { command } => token(command),
        FleetCommand::Audit { limit, before, centre } => {
            let request = v1::AuditRequest { limit, before };
            let found = call::again(&centre, async |mut c| Ok(c.audit(request).await?.into_inner()))?;
            show::audit(&found, centre.json)?;
            Ok(0)
        }
    }
}

/// Runs a command about the secrets with which hosts of a fleet authenticate their packets. Returns the exit code.
///
/// # Errors
/// The centre refuses, or cannot be reached.
pub fn secret(SecretCommand::Rotate { group, centre }: SecretCommand) -> io::Result<u8> {
    let request = v1::RotateSecretRequest { group: group.clone() };
    let done = call::once(&centre, async |mut c| Ok(c.rotate_secret(request).await?.into_inner()))?;
    show::json_or(&done, centre.json, || format!("secret {} of group {group} is being introduced", done.id))?;
    Ok(0)
}

/// The names of a fleet's objects of a kind. `centre` is the URL, if it is given.
///
/// # Errors
/// The centre refuses, or cannot be reached.
pub fn names(kind: KindArg, centre: Option<String>) -> io::Result<Vec<String>> {
    let centre = Centre {
        centre: centre.or_else(|| std::env::var("UNIRDMA_CENTRE").ok()),
        authority: std::env::var_os("UNIRDMA_AUTHORITY").map(PathBuf::from),
        json: false,
    };
    let found = call::pages(&centre, v1::GetRequest { kind: kind.message(), ..v1::GetRequest::default() })?;
    let objects = found.objects.iter().filter_map(|o| o.object.as_ref());
    Ok(objects.map(|o| o.name().to_owned()).collect())
}

/// Moves a vRNIC to another host.
///
/// # Errors
/// The centre refuses, or cannot be reached.
pub fn move_vrnic(vrnic: String, host: String, centre: &Centre) -> io::Result<u8> {
    let request = v1::MoveRequest { vrnic, host };
    let done = call::again(centre, async |mut c| Ok(c.r#move(request.clone()).await?.into_inner()))?;
    show::applied(&done, false, centre.json)?;
    Ok(0)
}

fn token(command: TokenCommand) -> io::Result<u8> {
    match command {
        TokenCommand::Create { name, role, group, host, expires, centre } => {
            let role = i32::from(match role {
                RoleArg::Admin => v1::Role::Admin,
                RoleArg::Reader => v1::Role::Reader,
                RoleArg::Tenant => v1::Role::Tenant,
                RoleArg::Join => v1::Role::Join,
            });
            let expires = expires.map_or(0, |seconds| show::now() + seconds);
            let (host, hosts) = match (role == i32::from(v1::Role::Tenant), host.as_slice()) {
                (true, _) => (String::new(), host),
                (false, [_, _, ..]) => return Err(io::Error::other("such a token is for one host; give --host once")),
                (false, one) => (one.concat(), Vec::new()),
            };
            let token = v1::Token { id: name, role, groups: group, host, expires, hosts };
            let request = v1::CreateTokenRequest { token: Some(token) };
            let made = call::once(&centre, async |mut c| Ok(c.create_token(request).await?.into_inner()))?;
            show::json_or(&made, centre.json, || made.secret.clone())?;
        }
        TokenCommand::Ls { centre } => {
            let found =
                call::again(&centre, async |mut c| Ok(c.list_tokens(v1::ListTokensRequest {}).await?.into_inner()))?;
            show::tokens(&found, centre.json)?;
        }
        TokenCommand::Revoke { name, centre } => {
            let request = v1::RevokeTokenRequest { id: name.clone() };
            let done = call::once(&centre, async |mut c| Ok(c.revoke_token(request).await?.into_inner()))?;
            show::json_or(&done, centre.json, || format!("token {name} is revoked"))?;
        }
    }
    Ok(0)
}
