//! Names of container images.

/// Whether the text has only characters of image names, which are safe in a manifest.
pub fn is_name(image: &str) -> bool {
    !image.is_empty()
        && image.chars().all(|letter| letter.is_ascii_alphanumeric() || "./:@_-".contains(letter))
}

/// Parses the name of an image.
pub fn parse(text: &str) -> Result<String, String> {
    if is_name(text) {
        Ok(text.to_owned())
    } else {
        Err("write the name of an image, for example registry.example/kilo:0.1.0".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_no_characters_that_a_manifest_could_misread() {
        assert!(parse("registry.example/kilo:0.1.0").is_ok());
        for wrong in ["", "a b", "kilo\"", "kilo\n"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
