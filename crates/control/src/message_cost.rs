//! Memory that a message takes once it is decoded, estimated from its encoding. Two encoded bytes may be an object with
//! all its fields, so the length says little.

use std::collections::HashMap;
use std::sync::LazyLock;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// Most memory of a message in a list, and of a field without its text, bytes. A message that is not in a list is part
/// of the message that contains it.
const MESSAGE: usize = 736;
const FIELD: usize = 32;

/// A field that is a message: its type, and whether it is a list.
type Inner = (String, bool);

/// The message fields of each message, by field number; and the message that each gRPC call takes.
struct Types {
    messages: HashMap<String, HashMap<u64, Inner>>,
    calls: HashMap<String, String>,
}

static TYPES: LazyLock<Types> = LazyLock::new(|| {
    let set = FileDescriptorSet::decode(unirdma_fleet::DESCRIPTORS).unwrap_or_default();
    let mut types = Types { messages: HashMap::new(), calls: HashMap::new() };
    for file in &set.file {
        let package = file.package();
        file.message_type.iter().for_each(|m| types.add(&format!(".{package}"), m));
        for service in &file.service {
            let calls = service.method.iter();
            let named = calls.map(|m| (format!("/{package}.{}/{}", service.name(), m.name()), m.input_type().into()));
            types.calls.extend(named);
        }
    }
    types
});

impl Types {
    fn add(&mut self, place: &str, message: &DescriptorProto) {
        let name = format!("{place}.{}", message.name());
        message.nested_type.iter().for_each(|m| self.add(&name, m));
        let fields = message.field.iter().filter(|f| f.r#type() == Type::Message);
        let inner = |f: &FieldDescriptorProto| (f.type_name().to_owned(), f.label() == Label::Repeated);
        let fields = fields.map(|f| (u64::from(f.number().unsigned_abs()), inner(f)));
        self.messages.insert(name, fields.collect());
    }
}

/// Weight of the message of a gRPC call. `call` is its address.
pub(crate) fn of_call(call: &str, message: &[u8]) -> usize {
    MESSAGE + TYPES.calls.get(call).map_or(0, |name| of_fields(name, message))
}

/// Weight of the fields of a message, up to the first one that cannot be decoded, where a decoder stops, too.
fn of_fields(name: &str, mut rest: &[u8]) -> usize {
    let inner = TYPES.messages.get(name);
    let mut weight = 0;
    while let Some(tag) = varint(&mut rest) {
        weight += FIELD;
        let length = match tag & 7 {
            0 => varint(&mut rest).map(|_| 0),
            1 => Some(8),
            2 => varint(&mut rest),
            // No message has a group. A decoder skips it and reads on. Its content weighs as if it were outside.
            3 | 4 => Some(0),
            5 => Some(4),
            _ => None,
        };
        let length = length.and_then(|n| usize::try_from(n).ok());
        let Some((field, after)) = length.and_then(|n| rest.split_at_checked(n)) else { break };
        weight += match inner.and_then(|i| i.get(&(tag >> 3))).filter(|_| tag & 7 == 2) {
            Some((name, list)) => of_fields(name, field) + if *list { MESSAGE } else { 0 },
            None => field.len(),
        };
        rest = after;
    }
    weight
}

/// Takes a varint.
fn varint(rest: &mut &[u8]) -> Option<u64> {
    prost::encoding::decode_varint(rest).ok()
}

/// Upper bound of the weight of a JSON message, by its punctuation.
pub(crate) fn of_json(text: &[u8]) -> usize {
    let (mut weight, mut before) = (MESSAGE + text.len(), b' ');
    for &sign in text.iter().filter(|b| !b.is_ascii_whitespace()) {
        weight += match (before, sign) {
            (b'[' | b',', b'{') => MESSAGE,
            (_, b',' | b'[') => FIELD,
            _ => 0,
        };
        before = sign;
    }
    weight
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_fleet::v1;

    #[test]
    fn no_message_takes_more_than_is_said() {
        let sizes = [
            size_of::<v1::Object>(),
            size_of::<v1::Vrnic>(),
            size_of::<v1::Host>(),
            size_of::<v1::Group>(),
            size_of::<v1::Rule>(),
            size_of::<v1::Limits>(),
            size_of::<v1::FromHost>(),
            size_of::<v1::VrnicState>(),
            size_of::<v1::Connection>(),
            size_of::<v1::Token>(),
        ];
        // A growing list has room for up to twice its length.
        assert!(sizes.iter().all(|s| 2 * s <= MESSAGE), "{sizes:?}");
        assert!(2 * size_of::<String>() <= 2 * FIELD);
    }

    #[test]
    fn a_message_weighs_what_it_becomes() {
        let apply = "/unirdma.fleet.v1.Fleet/Apply";
        // A thousand objects, encoded in two bytes each.
        let many = [0x0a, 0].repeat(1_000);
        assert_eq!(of_call(apply, &many), MESSAGE + 1_000 * (MESSAGE + FIELD));
        let vrnic = v1::Vrnic { name: "a".into(), ips: vec![String::new(); 1_000], ..Default::default() };
        let objects = vec![v1::Object { object: Some(vrnic.into()), revision: 0 }];
        let weight = of_call(apply, &v1::ApplyRequest { objects, ..Default::default() }.encode_to_vec());
        assert!((1_000 * FIELD..1_100 * FIELD + 2 * MESSAGE).contains(&weight), "{weight}");
        // A truncated message weighs only the part before.
        assert_eq!(of_call(apply, &[&[0x0a, 0][..], &[0x0a, 9, 1]].concat()), 2 * MESSAGE + 2 * FIELD);
        assert_eq!(of_call(apply, &[0xff; 30]), MESSAGE);
        assert_eq!(of_call("/other", &many), MESSAGE);
        // Nothing hides behind a group.
        let group = [&[0x7b, 0x08, 1, 0x7c][..], &many].concat();
        assert_eq!(v1::ApplyRequest::decode(&group[..]).unwrap().objects.len(), 1_000);
        assert_eq!(of_call(apply, &group), of_call(apply, &many) + 3 * FIELD);
        let json = br#"{"objects":[{"vrnic":{"ips":["",""]}}, {}]}"#;
        assert_eq!(of_json(json), 3 * MESSAGE + 4 * FIELD + json.len());
    }

    /// The message of each call is known.
    #[test]
    fn all_calls_are_known() {
        for call in ["Fleet/Apply", "Fleet/Watch", "Hosts/Join", "Hosts/Attach", "Centres/Ask"] {
            let name = &TYPES.calls[&format!("/unirdma.fleet.v1.{call}")];
            assert!(TYPES.messages.contains_key(name), "{call} takes {name}");
        }
    }
}
