//! Generates Rust from the .proto files of etcd, without `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["etcd/etcd.proto", "staged.proto"], ["proto"])?;
    tonic_prost_build::configure().build_client(true).build_server(false).build_transport(false).compile_fds(files)?;
    Ok(())
}
