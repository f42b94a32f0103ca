//! Conversion between structures of the RFC and of the native mode.

use unirdma_abi as abi;
use unirdma_abi::rfc;
use zerocopy::IntoBytes;

use crate::Identity;

pub(super) fn cap_of(c: &rfc::CreateQp) -> abi::QpCap {
    abi::QpCap {
        max_send_wr: c.max_send_wr.get(),
        max_recv_wr: c.max_recv_wr.get(),
        max_send_sge: c.max_send_sge.get(),
        max_recv_sge: c.max_recv_sge.get(),
        max_inline_data: c.max_inline_data.get(),
    }
}

pub(super) fn to_cap(c: &abi::QpCap) -> rfc::QpCap {
    rfc::QpCap {
        max_send_wr: c.max_send_wr.into(),
        max_recv_wr: c.max_recv_wr.into(),
        max_send_sge: c.max_send_sge.into(),
        max_recv_sge: c.max_recv_sge.into(),
        max_inline_data: c.max_inline_data.into(),
    }
}

/// The attributes of MODIFY_QP. `sgid_index` is the vRNIC's index of the GID.
pub(super) fn attr(a: &rfc::QpAttr, sgid_index: u8) -> abi::QpAttr {
    let to = &a.ah_attr;
    let grh = abi::GlobalRoute {
        dgid: to.grh.dgid,
        flow_label: to.grh.flow_label.get(),
        sgid_index,
        hop_limit: to.grh.hop_limit,
        traffic_class: to.grh.traffic_class,
        reserved: 0,
    };
    let ah_attr = abi::AhAttr {
        grh,
        sl: to.sl,
        static_rate: to.static_rate,
        port_num: to.port_num,
        is_global: to.ah_flags & rfc::AH_GRH,
        ..abi::AhAttr::default()
    };
    abi::QpAttr {
        qp_state: a.qp_state,
        cur_qp_state: a.cur_qp_state,
        path_mtu: a.path_mtu,
        path_mig_state: a.path_mig_state,
        qkey: a.qkey.get(),
        rq_psn: a.rq_psn.get(),
        sq_psn: a.sq_psn.get(),
        dest_qp_num: a.dest_qp_num.get(),
        qp_access_flags: a.qp_access_flags.get(),
        pkey_index: a.pkey_index.get(),
        en_sqd_async_notify: a.en_sqd_async_notify,
        max_rd_atomic: a.max_rd_atomic,
        max_dest_rd_atomic: a.max_dest_rd_atomic,
        min_rnr_timer: a.min_rnr_timer,
        port_num: a.port_num,
        timeout: a.timeout,
        retry_cnt: a.retry_cnt,
        rnr_retry: a.rnr_retry,
        rate_limit: a.rate_limit.get(),
        ah_attr,
        ..abi::QpAttr::default()
    }
}

/// The attributes of QUERY_QP. `sgid_index` is the driver's index of the GID.
pub(super) fn to_driver(a: &abi::QpAttr, sgid_index: u8) -> rfc::QpAttr {
    let grh = rfc::GlobalRoute {
        dgid: a.ah_attr.grh.dgid,
        flow_label: a.ah_attr.grh.flow_label.into(),
        sgid_index,
        hop_limit: a.ah_attr.grh.hop_limit,
        traffic_class: a.ah_attr.grh.traffic_class,
    };
    let ah_attr = rfc::AhAttr {
        grh,
        sl: a.ah_attr.sl,
        static_rate: a.ah_attr.static_rate,
        port_num: a.ah_attr.port_num,
        ah_flags: a.ah_attr.is_global,
        dmac: [0; 6],
    };
    rfc::QpAttr {
        qp_state: a.qp_state,
        cur_qp_state: a.cur_qp_state,
        path_mtu: a.path_mtu,
        path_mig_state: a.path_mig_state,
        qkey: a.qkey.into(),
        rq_psn: a.rq_psn.into(),
        sq_psn: a.sq_psn.into(),
        dest_qp_num: a.dest_qp_num.into(),
        qp_access_flags: a.qp_access_flags.into(),
        pkey_index: a.pkey_index.into(),
        en_sqd_async_notify: a.en_sqd_async_notify,
        sq_draining: a.sq_draining,
        max_rd_atomic: a.max_rd_atomic,
        max_dest_rd_atomic: a.max_dest_rd_atomic,
        min_rnr_timer: a.min_rnr_timer,
        port_num: a.port_num,
        timeout: a.timeout,
        retry_cnt: a.retry_cnt,
        rnr_retry: a.rnr_retry,
        rate_limit: a.rate_limit.into(),
        cap: to_cap(&a.cap),
        ah_attr,
        ..rfc::QpAttr::default()
    }
}

impl Identity {
    /// The configuration space in the RFC mode.
    pub fn rfc_config_space(&self) -> Vec<u8> {
        let c = &self.config;
        let known = rfc::cap::BAD_PKEY_CNTR
            | rfc::cap::BAD_QKEY_CNTR
            | rfc::cap::CHANGE_PHY_PORT
            | rfc::cap::SYS_IMAGE_GUID
            | rfc::cap::RC_RNR_NAK_GEN;
        let shape = super::shape(c);
        let config = rfc::Config {
            phys_port_cnt: u32::from(c.phys_port_cnt).into(),
            sys_image_guid: c.sys_image_guid.to_be_bytes(),
            vendor_id: c.vendor_id.into(),
            vendor_part_id: c.vendor_part_id.into(),
            hw_ver: c.hw_ver.into(),
            max_mr_size: c.max_mr_size.into(),
            page_size_cap: rfc::PAGE.into(),
            max_qp: (shape.qps as u32).into(),
            max_qp_wr: rfc::MAX_QP_WR.into(),
            device_cap_flags: (c.device_cap_flags & known).into(),
            max_send_sge: c.max_sge.into(),
            max_recv_sge: c.max_sge.into(),
            max_sge_rd: c.max_sge.into(),
            max_cq: (shape.cqs as u32).into(),
            max_cqe: rfc::MAX_CQE.into(),
            max_mr: c.max_mr.into(),
            max_pd: c.max_pd.into(),
            max_qp_rd_atom: c.max_qp_rd_atom.into(),
            max_res_rd_atom: c.max_qp_rd_atom.saturating_mul(shape.qps as u32).into(),
            max_qp_init_rd_atom: c.max_qp_rd_atom.into(),
            atomic_cap: c.atomic_cap,
            max_ah: c.max_ah.into(),
            max_pkeys: c.max_pkeys.into(),
            local_ca_ack_delay: c.local_ca_ack_delay,
            ..rfc::Config::default()
        };
        let mut bytes = config.as_bytes().to_vec();
        bytes.resize(256, 0);
        bytes
    }
}
