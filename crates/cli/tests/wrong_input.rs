//! Wrong input without a virtual layer: what it prints, and its exit code. `TRYCMD=overwrite cargo test -p unirdma-cli
//! --test wrong_input` writes the answers anew.

#[test]
fn wrong_input_says_what_is_wrong_and_what_to_do() {
    trycmd::TestCases::new().case("tests/wrong_input/*.trycmd");
}
