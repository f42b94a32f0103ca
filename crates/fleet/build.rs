//! Generates Rust from the messages and services in `proto/`: structures, their canonical JSON, and gRPC. protox
//! compiles the .proto files, so `protoc` is not needed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

const PROTOS: [&str; 3] =
    ["unirdma/fleet/v1/fleet.proto", "unirdma/fleet/v1/store.proto", "unirdma/fleet/v1/centres.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(PROTOS, ["proto"])?;
    let bytes = files.encode_to_vec();
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("fleet.descriptors"), &bytes)?;
    let feature = |name: &str| std::env::var_os(format!("CARGO_FEATURE_{name}")).is_some();
    tonic_prost_build::configure()
        .build_client(feature("CLIENT"))
        .build_server(feature("SERVER"))
        // Callers make the connections: with TLS, or in tests without a network.
        .build_transport(false)
        .compile_fds(files)?;
    pbjson_build::Builder::new().register_descriptors(&bytes)?.build(&[".unirdma.fleet.v1"])?;
    Ok(())
}
